"""A tool's result as the model reads it: text of bounded length, and the reason if the call failed.

Not here: calling the tool (`rollouts.env.tools`, `worker`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from rollouts.author_code import printable
from rollouts.encoding import encode
from rollouts.errors import NAME_CHARACTERS_MAX
from rollouts.types import Message, ToolCall

ToolFailure = Literal["malformed", "unknown_tool", "bad_arguments", "timeout", "exception", "crashed"]


AnswerAs = Literal["tool", "user if unread", "user"]
"""The role of the messages that answer calls. `user if unread`: `user` if no call of the reply could be read."""


class ToolOutcome(NamedTuple):
    """The text for the model, and why the call failed (None: it did not fail). `error` is the tool's exception with the
    line in the author's file; the model does not get it.
    """

    text: str
    failure: ToolFailure | None = None
    error: str = ""


def result_text(returned: Any) -> str:
    """The text for the model: text unchanged, None as empty text, anything else as JSON. A value that JSON cannot hold
    is replaced by a text that describes it. Raises any error that an object's `__str__` raises.

    >>> result_text({"a": 1}), result_text(None)
    ('{"a":1}', '')
    """
    if isinstance(returned, str):
        return printable(returned)
    if returned is None:
        return ""
    try:
        return msgspec.json.encode(returned).decode()
    except TypeError:
        return printable(str(returned))  # JSON cannot represent it, such as a numpy number: the model reads its `str`
    except (ValueError, RecursionError):
        return encode(returned).decode()


def shortened(text: str, characters_max: int) -> str:
    """The text. If it is longer than `characters_max`, it is cut and ends with a note."""
    if len(text) <= characters_max:
        return text
    return f"{text[:characters_max]}\n[cut: the first {characters_max} of {len(text)} characters]"


def tool_use(name: str, arguments: Mapping[str, Any], result: str, number: int = 0) -> list[Message]:
    """A call of a tool and its result, for `demonstrations`. Several calls in one conversation have different numbers.

    >>> call, answer = tool_use("add", {"a": 2, "b": 3}, "5")
    >>> call.tool_calls[0].name, answer.role, answer.text
    ('add', 'tool', '5')
    """
    call = ToolCall(name, dict(arguments), id=f"call_{number}")
    return [Message("assistant", "", [call]), Message("tool", result, tool_call_id=call.id, name=name)]


def answers_of(reply: Message, texts: Sequence[str], answer_as: AnswerAs) -> list[Message]:
    """The messages that answer the calls of a reply with these texts, one for each call.

    A chat template may not show a call. Then there is none that a tool message could answer, and the answer is one
    message of the user.
    """
    calls = reply.tool_calls
    if calls and (answer_as == "user" or (answer_as == "user if unread" and all(call.error for call in calls))):
        return [Message("user", "\n".join(texts))]
    return [
        Message("tool", text, tool_call_id=call.id or None, name=call.name[:NAME_CHARACTERS_MAX] or None)
        for call, text in zip(calls, texts, strict=True)
    ]
