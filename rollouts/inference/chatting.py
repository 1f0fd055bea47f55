"""The interface of a chat engine: messages in, a message out, without token ids.

Use such an engine for evaluation only. Its sampled ids are unknown, so you cannot train on them. It implements
`InferenceBackend` for sessions and health; `generate`, `score` and `update_weights` raise. Its factory is marked
`evaluation_only`, so that a training run refuses it before a model loads. An implementation is in `openai`.
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
    """One turn: the whole conversation, and the OpenAI schemas of the offered tools ([]: no tools).

    `max_tokens` limits the reply. `temperature` 0 is greedy. `seed` makes the turn repeatable if the engine supports
    seeds. `role` is the role that replies, in an environment with roles.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int
    seed: int
    temperature: float = 1.0
    role: str = ""


class ChatReply(msgspec.Struct, frozen=True):
    """The assistant's message, and why the message ended.

    `finish` is `context` if the conversation exceeds the model's context; then the message is empty, and `detail` is
    the engine's error message. The token counts come from the engine; None: the engine did not report them.
    """

    message: Message
    finish: Literal["stop", "length", "context"]
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    detail: str = ""


class CanChat(InferenceBackend, Protocol):
    """An engine that takes messages. Its capabilities have `chats` and `checks`."""

    async def chat(self, request: ChatRequest) -> ChatReply:
        """The reply to a conversation. A malformed tool call is a ToolCall with `error`. Raises InferenceError."""

    async def check(self, tools: Sequence[dict[str, Any]] = (), temperature: float = 1.0) -> None:
        """Raise UserError if the engine cannot be used with its settings and these tools. Leaves nothing open."""


def evaluation_only(factory: F) -> F:
    """Mark the factory of a chat engine. Training runs refuse it; an evaluation with it needs no tokenizer and no chat
    template.
    """
    setattr(factory, _MARK, True)
    return factory


def is_evaluation_only(component: Any) -> bool:
    """Whether a component has the mark of `evaluation_only`."""
    return bool(getattr(component, _MARK, False))
