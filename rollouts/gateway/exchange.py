"""What a client asks a model, and what it gets, whatever API it speaks.

A module of an API reads a body into `Asked` and writes `Answered`. So every API has the same limits and errors, and the
function that answers knows no API.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from rollouts.gateway.http_server import HTTPResponse
from rollouts.types import Message, ToolCall

CHOICES_MAX = 64
TOKENS_MAX = 2**31
NO_SCHEMA = "is not supported here; leave it out, or offer a tool with this schema as its parameters"
"""Why a format of replies is refused."""
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


class Reply(msgspec.Struct, omit_defaults=True):
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

    replies: list[Reply]
    prompt_tokens: int = 0


class Request(NamedTuple):
    """A request that was read. `echo` are the values that the response of this API repeats."""

    asked: Asked
    model: str | None = None
    stream: bool = False
    echo: Mapping[str, Any] = {}


class APIError(Exception):
    """An error that the client gets instead of a reply."""

    def __init__(self, status: int, words: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(words)
        self.status, self.parameter, self.code = status, parameter, code


Answer = Callable[[Asked], Awaitable[Answered]]
"""Answers a request. Raises APIError for a mistake of the client, and for a model that cannot answer."""


def read_body(body: bytes, kind: type[T]) -> T:
    """The body as this struct. Raises APIError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise APIError(400, f"the body cannot be read: {error}") from error


def text_of(content: str | Sequence[dict[str, Any]] | None, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a message's content. `kinds` are the types of its text parts. Raises APIError for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            words = f"a part of type {part.get('type')!r} is not supported: the model reads text only"
            raise APIError(400, words, parameter="messages")
    return "".join(part["text"] for part in content)


def check_range(name: str, value: float | None, least: float, most: float) -> None:
    """Raise APIError for a number that is out of its range."""
    if value is not None and not least <= value <= most:
        raise APIError(400, f"{name} is {value}; it must be from {least:g} to {most:g}", parameter=name)


def function_schema(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as an OpenAI function schema. Raises APIError."""
    if not isinstance(name, str) or not name or not isinstance(parameters, dict | None):
        raise APIError(400, "a tool has a name, and a JSON schema of its parameters", parameter="tools")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def new_id(prefix: str) -> str:
    """A new id, such as `resp_3f0c…`."""
    return f"{prefix}{secrets.token_hex(12)}"


def as_json(value: Any, status: int = 200) -> HTTPResponse:
    """A response with a JSON body."""
    return HTTPResponse(status, msgspec.json.encode(value))


def event_stream(events: Sequence[tuple[str, dict[str, Any]]], *, end: bytes = b"") -> HTTPResponse:
    """Server-sent events as one body, each with its name ("": none)."""
    lines = [(f"event: {name}\n".encode() if name else b"", msgspec.json.encode(event)) for name, event in events]
    body = b"".join(name + b"data: " + event + b"\n\n" for name, event in lines)
    return HTTPResponse(200, body + end, "text/event-stream")


# --- the reply that a client sees -----------------------------------------------------------------------------------


def seen_reply(message: Message, stops: Sequence[str], *, is_cut: bool, tokens: int, new_call: str) -> Reply:
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
    return Reply(seen, finish, tokens, found)


def cut_at_stop(tokens: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int:
    """The number of tokens up to the one that completes the first stop text; all of them if there is none."""
    if not any(stop and stop in decode(tokens) for stop in stops):
        return len(tokens)
    low, high = 1, len(tokens)
    while low < high:  # a longer text keeps the stop text, so the search can halve
        middle = (low + high) // 2
        text = decode(tokens[:middle])
        low, high = (low, middle) if any(stop and stop in text for stop in stops) else (middle + 1, high)
    return low


def arguments_of(call: ToolCall) -> str:
    """The arguments of a call as JSON."""
    return msgspec.json.encode(call.arguments).decode()
