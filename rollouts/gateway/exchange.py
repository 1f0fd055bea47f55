"""What a client asks a model, and what it gets, whatever API it speaks.

A `ClientAPI` reads a body into `Asked` and writes `Answered`. So every API has the same limits and errors, and the
function that answers knows no API.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import msgspec

from rollouts.author_code import shown
from rollouts.bounds import MESSAGES_MAX, STOPS_MAX, TOOLS_MAX, excess
from rollouts.chat.tool_call_formats import read_call
from rollouts.gateway.http_server import HTTPResponse
from rollouts.types import Message, ToolCall

WORDS_CHARACTERS_MAX = 1000
TOKENS_MAX = 2**31
NO_SCHEMA = "is not supported here; leave it out, or offer a tool with this schema as its parameters"
T = TypeVar("T")


class Asked(msgspec.Struct, omit_defaults=True):
    """A conversation to continue. `tools` are OpenAI function schemas.

    `max_tokens` limits the reply, which also ends at the first of the texts `stop`. `count` is the number of replies,
    0 to count the tokens of the conversation only.
    `unsupported` names the settings of the request that no engine here follows, such as `top_p`.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = []
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: list[str] = []
    count: int = 1
    logprobs: bool = False
    unsupported: list[str] = []


class ClientReply(msgspec.Struct, omit_defaults=True):
    """One reply as the client gets it. `stop` is the stop text that ended it, and is not part of the message. `tokens`
    is the number of sampled tokens, 0 if the engine does not report it; `logprobs` has each with its text, if asked.
    """

    message: Message
    finish: Literal["stop", "length", "tool_calls"]
    tokens: int
    stop: str | None = None
    logprobs: list[tuple[str, float]] = []


class Answered(msgspec.Struct, omit_defaults=True):
    """The replies, and the number of tokens of the conversation before them."""

    replies: list[ClientReply]
    prompt_tokens: int = 0


class ClientRequest(NamedTuple):
    """A request that was read. `echo` are the values that the response of this API repeats."""

    asked: Asked
    model: str | None = None
    stream: bool = False
    echo: Mapping[str, Any] = {}


class ClientAPI(NamedTuple):
    """How one API is spoken: reads the body of a request, writes the response of a model with this name, and writes an
    error. `conversation` is the field of a request that holds the messages.
    """

    read: Callable[[bytes], ClientRequest]
    write: Callable[[ClientRequest, Answered, str], HTTPResponse]
    refuse: Callable[[APIError], HTTPResponse]
    conversation: str = "messages"


class APIError(Exception):
    """An error that the client gets instead of a reply."""

    def __init__(self, status: int, words: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(words[:WORDS_CHARACTERS_MAX])
        self.status, self.parameter, self.code = status, parameter, code


def mistake_in(parameter: str, words: str, *, code: str | None = None) -> APIError:
    """The error for a field of a request that the client must change."""
    return APIError(400, words, parameter=parameter, code=code)


Answer = Callable[[Asked], Awaitable[Answered]]
"""Answers a request. Raises APIError for a mistake of the client, and for a model that cannot answer."""


def read_body(body: bytes, keys: type[T], ignored: str) -> T:
    """The body as a struct with these keys. The keys `ignored` are accepted without a meaning, and all others are
    refused. Raises APIError, which names the field at fault.
    """
    kind: Any = _body_type(keys, ignored)  # type: ignore[arg-type]  # a type is hashable
    try:
        given = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        words = str(error)
        at = re.search(r"`(?:\$\.)?([^`]+)`$", words) or re.search(r"field `([^`]+)`", words)
        name = at[1] if at and isinstance(error, msgspec.ValidationError) else _unreadable_field(body)
        place = f" (in {name})" if name and name not in words else ""
        raise APIError(400, f"the body cannot be read{place}: {words}", parameter=name or None) from error
    for name in kind.__struct_fields__:
        if problem := excess(getattr(given, name)):
            raise mistake_in(name, f"{name} is {problem}")
    return cast(T, given)


@functools.cache
def _body_type(keys: type, ignored: str) -> Any:
    fields = [(name, Any, None) for name in ignored.split()]
    return msgspec.defstruct(keys.__name__, fields, bases=(keys,), forbid_unknown_fields=True)


# An unfinished string ends with the body, so that no part of it is searched twice.
_SIGNS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[][{},:]', re.DOTALL)


def _unreadable_field(body: bytes) -> str:
    """The first field of a body whose value cannot be read; "" if there is none."""
    depth, last, name, begin = 0, b"", "", 0
    for found in _SIGNS.finditer(body):
        sign = found[0]
        if depth == 1 and sign == b":" and not name:
            name, begin = last[1:-1].decode(errors="replace"), found.end()
        elif depth == 1 and sign in (b",", b"}") and name:
            try:
                msgspec.json.decode(body[begin : found.start()])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return name
            name = ""
        depth += (sign in (b"[", b"{")) - (sign in (b"]", b"}"))
        last = sign
    return name


def check_lengths(
    name: str, items: Sequence[Any], within: Iterable[Sequence[Any]], tools: Any, stops: Sequence[str] = ()
) -> None:
    """Raise APIError for more tools, stop texts or messages than a request may have. The API calls the messages `name`.
    `within` are the lists of calls or blocks in messages, which count as messages.
    """
    counts = {name: len(items) + sum(map(len, within)), "tools": len(tools or ()), "stop": len(stops)}
    for field, most in ((name, MESSAGES_MAX), ("tools", TOOLS_MAX), ("stop", STOPS_MAX)):
        if counts[field] > most:
            raise mistake_in(field, f"{field} has {counts[field]} items; it may have {most}")


def content_text(content: Any, parameter: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a message's content: text, parts, or nothing. `kinds` are the types of its text parts. Raises
    APIError for anything else; `parameter` is the field that holds the content.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise mistake_in(parameter, f"{parameter}: a content is text or a list of parts, got {shown(content)}")
    for part in content:
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            words = f"a part of type {shown(part.get('type'))} is not supported: the model reads text only"
            raise mistake_in(parameter, f"{parameter}: {words}")
    return "".join(part["text"] for part in content)


def call_of(raw: Any, parameter: str) -> ToolCall:
    """An earlier call of the model, with its arguments as JSON text. Raises APIError for one that cannot be read."""
    call = read_call(raw)
    if call.error is not None:
        raise mistake_in(parameter, f"{parameter}: the call {shown(call.id)}: {call.error}")
    return call


def check_ranges(given: Any, **ranges: tuple[float, float]) -> None:
    """Raise APIError for a number of a body that is out of its range."""
    for name, (least, most) in ranges.items():
        value = getattr(given, name)
        if value is not None and not least <= value <= most:
            raise mistake_in(name, f"{name} is {value}; it must be from {least:g} to {most:g}")


def unsupported(**settings: bool) -> list[str]:
    """The names of the settings that a request uses."""
    return [name for name, is_used in settings.items() if is_used]


def refuse_unsupported(**settings: bool) -> None:
    """Raise APIError for a setting that a request uses, although no engine here supports it."""
    for name in unsupported(**settings):
        raise mistake_in(name, f"{name} is not supported here; leave it out")


def refuse_format(name: str, format_: dict[str, Any] | None) -> None:
    """Raise APIError for a format of replies other than text."""
    if format_ not in (None, {"type": "text"}):
        raise mistake_in(name, f"{name} {NO_SCHEMA}")


def function_schema(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as an OpenAI function schema. Raises APIError."""
    is_read = isinstance(name, str) and name and isinstance(parameters, dict | None)
    if not is_read or not isinstance(description, str | None):
        words = "a tool has a name, a JSON schema of its parameters, and text as its description"
        raise mistake_in("tools", f"tools: {words}")
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def json_text(value: Any) -> str:
    """A value as JSON, such as the arguments of a call."""
    return msgspec.json.encode(value).decode()


def new_id(prefix: str) -> str:
    """A new id, such as `resp_3f0c…`."""
    return f"{prefix}{secrets.token_hex(12)}"


# --- the reply that a client sees -----------------------------------------------------------------------------------


def seen_reply(message: Message, stops: Sequence[str], *, is_cut: bool, tokens: int, new_call: str) -> ClientReply:
    """What a client sees of a message: the text before the first stop text, and the calls that can be read.

    A call without an id gets one that begins with `new_call`.
    """
    text, found = message.text, None
    places = [(text.index(stop), stop) for stop in stops if stop and stop in text]
    if places:
        at, found = min(places)
        text = text[:at]
    calls = [] if found is not None else [call for call in message.tool_calls if call.error is None]
    calls = [
        call if call.id else msgspec.structs.replace(call, id=f"{new_call}{place}") for place, call in enumerate(calls)
    ]
    finish: Literal["stop", "length", "tool_calls"] = "tool_calls" if calls else "stop"
    if is_cut and found is None:
        finish = "length"
    seen = Message("assistant", text, calls, reasoning=message.reasoning)
    return ClientReply(seen, finish, tokens, found)
