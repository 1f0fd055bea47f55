"""The model of an episode as a client of upstream, and messages in both forms."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from verifiers.v1.clients import Client
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.dialects import Dialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import AssistantMessage, Response, Usage
from verifiers.v1.types import ToolCall as UpstreamCall

from rollouts import Message
from rollouts.agent.on_asyncio import AsyncioModel, ModelEndedError, Turn
from rollouts.types import ToolCall

MODEL = "policy"
"""The name of the run's model in upstream's traces."""

OVER = "maximum context length"
"""With these words in an error, upstream's chat program ends as it does when the context is full."""


class PolicyClient(Client):  # type: ignore[misc]
    """Upstream's client of a whole run: `conversations` are those of the rollouts, by the id of their trace."""

    def __init__(self) -> None:
        self.conversations: dict[str, Conversation] = {}

    async def get_response(
        self, dialect: Dialect, body: dict[str, Any], sampling: Any, session_id: str | None = None, **_: Any
    ) -> Response:
        """The reply of the model of this rollout. Raises ProviderError."""
        request = dialect.parse_request(body)
        return await self.conversations[session_id or ""].reply(request.messages, request.tools or [])


class Conversation:
    """The model of one rollout.

    Upstream has the conversation in its own form. A reply that comes back unchanged is the recorded message again, so
    that its tokens are continued.
    """

    def __init__(self, model: AsyncioModel) -> None:
        self._model = model
        self._said: dict[str, Message] = {}
        self._calls: dict[str, ToolCall] = {}
        self._numbers = itertools.count()

    async def reply(self, messages: Sequence[Any], tools: Sequence[Any]) -> Response:
        """The reply to a conversation. Raises ProviderError if the model gives no more replies."""
        schemas = [
            {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
            for t in tools
        ]
        try:
            turn = await self._model.chat(self.own_messages(messages), schemas)
        except ModelEndedError as error:
            raise ProviderError(f"{OVER}: {error}", status_code=400) from error
        response = self._response(turn)
        self._said[_key(response.message)] = turn.message
        response.raw = serialize_completion(response, MODEL)
        return response

    def own_messages(self, messages: Sequence[Any]) -> list[Message]:
        """A conversation of upstream as that of the run."""
        own: list[Message] = []
        waiting = list(messages)
        while waiting:
            message = waiting.pop(0)
            said = self._said.get(_key(message))
            own.append(said or own_message(message, self._calls))
            calls = getattr(message, "tool_calls", None) or []
            answers = waiting[: len(calls)]
            if said is not None and _are_answers(answers, calls):
                own += self._model.answers(said, [answer.content for answer in answers])
                del waiting[: len(calls)]
        return own

    def _response(self, turn: Turn) -> Response:
        reply = turn.message
        calls = [self._upstream_call(call) for call in reply.tool_calls] or None
        return Response(
            id=f"turn-{next(self._numbers)}",
            created=0,
            model=MODEL,
            message=AssistantMessage(content=reply.text or None, reasoning_content=reply.reasoning, tool_calls=calls),
            finish_reason="length" if turn.is_cut else "tool_calls" if calls else "stop",
            usage=Usage(prompt_tokens=0, completion_tokens=turn.tokens),
        )

    def _upstream_call(self, call: ToolCall) -> UpstreamCall:
        """A call with an id of its own. One that the run could not read has no JSON as its arguments."""
        made = call.id if call.id and call.id not in self._calls else f"call_{next(self._numbers)}"
        self._calls[made] = call
        arguments = json.dumps(call.arguments) if call.error is None else call.error
        return UpstreamCall(id=made, name=call.name, arguments=arguments)


def own_message(message: Any, calls: dict[str, ToolCall]) -> Message:
    """One message of upstream. `calls` are those of the model by upstream's id."""
    content = message.content or ""
    if not isinstance(content, str):
        content = [part.model_dump() for part in content]
    if message.role == "tool":
        call = calls.get(message.tool_call_id, ToolCall(message.name or "", id=message.tool_call_id))
        return Message("tool", content, tool_call_id=call.id or None, name=call.name or None)
    if message.role == "assistant":
        made = [ToolCall(each.name, _object(each.arguments), id=each.id) for each in message.tool_calls or []]
        return Message("assistant", content, tool_calls=made, reasoning=message.reasoning_content)
    return Message(message.role, content)


def _object(arguments: str) -> dict[str, Any]:
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _are_answers(answers: Sequence[Any], calls: Sequence[Any]) -> bool:
    """Whether these messages answer these calls, each one with text."""
    if not calls or len(answers) != len(calls) or any(each.role != "tool" for each in answers):
        return False
    same = all(answer.tool_call_id == call.id for answer, call in zip(answers, calls, strict=True))
    return same and all(isinstance(answer.content, str) for answer in answers)


def _key(message: Any) -> str:
    """What makes two replies equal; empty for other messages."""
    if message.role != "assistant":
        return ""
    calls = [[call.id, call.name, call.arguments] for call in message.tool_calls or []]
    return json.dumps([message.content or "", message.reasoning_content or "", calls])
