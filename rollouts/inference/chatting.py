"""What the agent loop asks of an engine that takes messages and gives a message: no token ids come or go.

Such an engine is good for evaluation only: what it sampled cannot be known, so nothing can be trained on it. It is an
`InferenceBackend` too, for sessions and health, whose `generate`, `score` and `update_weights` refuse. Its factory is
marked `evaluation_only`, which is seen before a model loads. Left out: any one such engine (`openai`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from rollouts.inference.base import InferenceBackend
from rollouts.types import Message

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__rollouts_evaluation_only__"


class ChatRequest(msgspec.Struct, frozen=True):
    """One turn: the whole conversation, and the OpenAI schemas of the tools that may be called (none: []).

    `max_tokens` bounds what is sampled. `temperature` 0 is greedy. `seed` makes a turn repeatable where the engine
    knows seeds.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int
    seed: int
    temperature: float = 1.0


class ChatReply(msgspec.Struct, frozen=True):
    """The assistant's message, and why it ended. `context`: the conversation is longer than the model's context, and
    nothing was said; `detail` has the engine's words. Counts of tokens are the engine's own; None: it did not say.
    """

    message: Message
    finish: Literal["stop", "length", "context"]
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    detail: str = ""


class CanChat(InferenceBackend, Protocol):
    """An engine that is spoken to in messages; its capabilities say `chats`, and `checks` where it can be asked."""

    async def chat(self, request: ChatRequest) -> ChatReply:
        """The reply to a conversation. A call that cannot be read is a ToolCall with `error`. Raises InferenceError."""

    async def check(self, tools: Sequence[dict[str, Any]] = (), temperature: float = 1.0) -> None:
        """Raise UserError where it cannot be used as it is set up, with these tools. Nothing stays open."""


def evaluation_only(factory: F) -> F:
    """Mark the factory of an engine that is spoken to in messages: a run that trains refuses it, and an evaluation
    needs neither tokenizer nor chat template for it.
    """
    setattr(factory, _MARK, True)
    return factory


def is_evaluation_only(component: Any) -> bool:
    """Whether a component is so marked."""
    return bool(getattr(component, _MARK, False))
