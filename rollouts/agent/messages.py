"""Messages that an environment gave or a model wrote, as a conversation keeps them: with text that can be encoded."""

from __future__ import annotations

from typing import Any

import msgspec

from rollouts.author_code import printable, shown
from rollouts.bounds import bounded_call
from rollouts.encoding import DEPTH_MAX, plain
from rollouts.errors import ModelError
from rollouts.types import Message, ToolCall


def readable_message(message: Message) -> Message:
    """A copy with lone surrogates written as escapes, because tokenizers and files do not accept them.

    Raises ModelError if a field has a type that templates cannot read, since the struct does not check its fields.
    """
    content, calls = message.content, message.tool_calls
    has_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not isinstance(message.role, str) or not (has_parts or isinstance(content, str)):
        raise ModelError(
            f"a message's role must be text, and its content text or a list of parts; got {shown(message.role)} and "
            f"{type(content).__name__}"
        )
    if not isinstance(calls, list) or not all(isinstance(each, ToolCall) for each in calls):
        raise ModelError(f"a message's tool_calls must be a list of ToolCall, got {shown(calls)}")
    return Message(
        printable(message.role),
        printable(content) if isinstance(content, str) else [_readable_value(part) for part in content],
        [_readable_call(each) for each in calls],
        *(_readable_text(each) for each in (message.tool_call_id, message.name, message.reasoning)),
    )


def _readable_text(text: Any) -> str | None:
    return None if text is None else printable(text) if isinstance(text, str) else shown(text)


def _readable_value(value: Any, around: tuple[int, ...] = ()) -> Any:
    """A copy with readable text at any depth. Other objects, such as an image, are not copied. `around` are the
    identities of the values that contain this one, to find cycles.
    """
    if isinstance(value, str):
        return printable(value)
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) in around or len(around) >= DEPTH_MAX:
        return plain(value)
    around = (*around, id(value))
    if isinstance(value, dict):
        return {_readable_value(key): _readable_value(each, around) for key, each in value.items()}
    return [_readable_value(each, around) for each in value]


def _readable_call(call: ToolCall) -> ToolCall:
    call = bounded_call(call)
    try:
        msgspec.json.encode(call)
    except (TypeError, ValueError, RecursionError):
        name, number, error = map(_readable_text, (call.name, call.id, call.error))
        return ToolCall(
            name or "", plain(call.arguments) if isinstance(call.arguments, dict) else {}, number or "", error
        )
    return call
