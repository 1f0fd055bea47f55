"""The model of an episode as a client of upstream, and messages in both forms."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from verifiers.legacy.clients import Client
from verifiers.legacy.errors import OverlongPromptError
from verifiers.legacy.types import Response, ResponseMessage, Tool, Usage
from verifiers.legacy.types import ToolCall as UpstreamCall
from verifiers.legacy.utils.message_utils import normalize_messages

from rollouts import Message
from rollouts.agent.on_asyncio import AsyncioModel, ModelEndedError, Turn
from rollouts.types import ToolCall


class PolicyClient(Client):  # type: ignore[misc]
    """Upstream's client that asks the model of one episode.

    Upstream has the conversation in its own form. A reply that comes back unchanged is the recorded message again, so
    that its tokens are continued.
    """

    def __init__(self, model: AsyncioModel) -> None:
        super().__init__(None)
        self._model = model
        self._said: dict[str, Message] = {}
        self._calls: dict[str, ToolCall] = {}
        self._numbers = itertools.count()

    def setup_client(self, config: Any) -> None:
        """There is no connection."""

    async def close(self) -> None:
        """There is no connection."""

    async def to_native_tool(self, tool: Tool) -> dict[str, Any]:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": function}

    async def to_native_prompt(self, messages: Any) -> tuple[list[Message], dict[str, Any]]:
        return self.own_messages(messages), {}

    async def get_native_response(
        self, prompt: list[Message], model: str, sampling_args: Any, tools: list[dict[str, Any]] | None = None, **_: Any
    ) -> Turn:
        try:
            return await self._model.chat(prompt, tools or [])
        except ModelEndedError as error:
            raise OverlongPromptError(str(error)) from error  # upstream then ends the rollout and scores it

    async def raise_from_native_response(self, response: Turn) -> None:
        """A reply is always valid."""

    async def from_native_response(self, response: Turn) -> Response:
        reply = response.message
        calls = [self._upstream_call(call) for call in reply.tool_calls]
        message = ResponseMessage(
            content=reply.text,
            reasoning_content=reply.reasoning,
            tool_calls=calls or None,
            finish_reason="length" if response.is_cut else "tool_calls" if calls else "stop",
            is_truncated=response.is_cut,
        )
        self._said[_key(message)] = reply
        used = response.tokens
        usage = Usage(prompt_tokens=0, reasoning_tokens=0, completion_tokens=used, total_tokens=used)
        return Response(id=f"turn-{next(self._numbers)}", created=0, model="policy", usage=usage, message=message)

    def own_messages(self, messages: Any) -> list[Message]:
        """A conversation of upstream as that of the run."""
        own: list[Message] = []
        waiting = list(messages)
        while waiting:
            message = waiting.pop(0)
            own.append(self._own(message))
            calls = getattr(message, "tool_calls", None) or []
            answers = waiting[: len(calls)]
            if _key(message) in self._said and _are_answers(answers, calls):
                own += self._model.answers(own[-1], [answer.content for answer in answers])
                del waiting[: len(calls)]
        return own

    def _own(self, message: Any) -> Message:
        if message.role == "assistant" and (said := self._said.get(_key(message))) is not None:
            return said
        return own_message(message, self._calls)

    def _upstream_call(self, call: ToolCall) -> UpstreamCall:
        """A call with an id of its own. One that the run could not read has no JSON as its arguments."""
        made = call.id if call.id and call.id not in self._calls else f"call_{next(self._numbers)}"
        self._calls[made] = call
        arguments = json.dumps(call.arguments) if call.error is None else call.error
        return UpstreamCall(id=made, name=call.name, arguments=arguments)


def prompt_of(row: dict[str, Any]) -> list[Message]:
    """The prompt of a row of a dataset."""
    return [own_message(message, {}) for message in normalize_messages(row["prompt"], field_name="prompt")]


def own_message(message: Any, calls: dict[str, ToolCall]) -> Message:
    """One message of upstream. `calls` are those of the model by upstream's id."""
    content = _own_content(message.content)
    if message.role == "tool":
        call = calls.get(message.tool_call_id, ToolCall("", id=message.tool_call_id))
        return Message("tool", content, tool_call_id=call.id or None, name=call.name or None)
    if message.role == "assistant":
        made = [ToolCall(each.name, _object(each.arguments), id=each.id) for each in message.tool_calls or []]
        return Message("assistant", content, tool_calls=made, reasoning=message.reasoning_content)
    return Message("user" if message.role == "text" else message.role, content)


def _own_content(content: Any) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    return [part if isinstance(part, dict) else part.model_dump() for part in content]


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
    """What makes two replies equal."""
    if message.role != "assistant":
        return ""
    calls = [[call.id, call.name, call.arguments] for call in message.tool_calls or []]
    return json.dumps([_own_content(message.content), message.reasoning_content, calls])
