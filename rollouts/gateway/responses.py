"""OpenAI's Responses: `POST /v1/responses`.

`previous_response_id` continues an earlier response of the same server. The last ones are kept (`Earlier`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from rollouts.author_code import shown
from rollouts.gateway.exchange import (
    NO_SCHEMA,
    TOKENS_MAX,
    Answered,
    APIError,
    Asked,
    Reply,
    Request,
    call_of,
    check_lengths,
    check_range,
    content_text,
    function_schema,
    json_arguments,
    new_id,
    read_body,
)
from rollouts.gateway.http_server import HTTPResponse, as_json, event_stream
from rollouts.types import Message, ToolCall

EARLIER_MAX = 1000
EARLIER_CHARACTERS_MAX = 64 << 20
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class _Text(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: Any = None


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """The keys of a request. The last ones, from `store` on, are accepted and ignored."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: _Text | None = None
    stream: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    store: Any = None
    include: Any = None
    context_management: Any = None
    max_tool_calls: Any = None
    metadata: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    stream_options: Any = None
    truncation: Any = None
    user: Any = None


class Earlier:
    """The conversations of the last responses, by their ids: at most `EARLIER_MAX` of them, and, but for the last one,
    with `EARLIER_CHARACTERS_MAX` characters in all.
    """

    def __init__(self) -> None:
        self.conversations: dict[str, list[Message]] = {}
        self._sizes: dict[str, int] = {}

    def add(self, number: str, messages: list[Message]) -> None:
        """Keep the conversation of the response with this id."""
        self.conversations[number] = messages
        self._sizes[number] = sum(len(each.text) for each in messages)
        while len(self._sizes) > EARLIER_MAX or (
            len(self._sizes) > 1 and sum(self._sizes.values()) > EARLIER_CHARACTERS_MAX
        ):
            oldest = next(iter(self._sizes))
            del self._sizes[oldest], self.conversations[oldest]


def read(body: bytes, earlier: Mapping[str, list[Message]]) -> Request:
    """The request. `earlier` has the conversation of each earlier response by its id. Raises APIError."""
    given = read_body(body, _Body)
    cannot = {
        "top_logprobs": bool(given.top_logprobs),
        "background": bool(given.background),
        "conversation": given.conversation is not None,
        "prompt": given.prompt is not None,
    }
    if given.text is not None and given.text.format not in (None, {"type": "text"}):
        raise APIError(400, f"text.format {NO_SCHEMA}", parameter="text.format")
    for key, is_asked in cannot.items():
        if is_asked:
            raise APIError(400, f"{key} is not supported here; leave it out", parameter=key)
    check_range("temperature", given.temperature, 0.0, 100.0)
    check_range("max_output_tokens", given.max_output_tokens, 1, TOKENS_MAX)
    before: list[Message] = []
    if (previous := given.previous_response_id) is not None:
        if previous not in earlier:
            words = f"there is no earlier response {shown(previous)} here; send the whole conversation in input"
            raise APIError(404, words, parameter="previous_response_id")
        before = earlier[previous]
    items = [{"role": "user", "content": given.input}] if isinstance(given.input, str) else given.input
    check_lengths("input", [*before, *items], (), given.tools)
    messages = [*before, *_messages(items)]
    if not messages:
        raise APIError(400, "input is empty", parameter="input")
    if given.instructions:
        messages = [Message("system", given.instructions), *messages]
    tools = [_schema(tool) for tool in given.tools or []]
    sampling = {"top_p": given.top_p not in (None, 1), "tool_choice": given.tool_choice not in (None, "auto", "none")}
    asked = Asked(
        messages,
        [] if given.tool_choice == "none" else tools,
        given.max_output_tokens,
        given.temperature,
        unsupported=[key for key, is_asked in sampling.items() if is_asked],
    )
    names = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p")
    echo = {name: getattr(given, name) for name in names}
    echo |= {"tools": given.tools or [], "tool_choice": given.tool_choice or "auto"}
    return Request(asked, given.model, bool(given.stream), {**echo, "metadata": given.metadata or {}})


def write(request: Request, answered: Answered, model: str) -> tuple[HTTPResponse, str]:
    """The response, and its id."""
    (reply,) = answered.replies
    is_cut = reply.finish == "length"
    whole = {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": model,
        "output": _items(reply),
        "parallel_tool_calls": True,
        **request.echo,
        "usage": {
            "input_tokens": answered.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answered.prompt_tokens + reply.tokens,
        },
    }
    return (_stream(whole) if request.stream else as_json(whole)), whole["id"]


def conversation(request: Request, answered: Answered) -> list[Message]:
    """The conversation after the response, without its instructions, which belong to one request only."""
    asked = request.asked.messages[1:] if request.echo["instructions"] else request.asked.messages
    return [*asked, answered.replies[0].message]


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        words = f"tools: a tool of type {shown(tool.get('type'))} runs on OpenAI's servers; define it as a function"
        raise APIError(400, words, parameter="tools")
    return function_schema(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _messages(items: list[dict[str, Any]]) -> list[Message]:
    """The messages of input items. The items of one reply (reasoning, text, calls) become one message."""
    messages: list[Message] = []
    for is_reply, group in itertools.groupby(items, _is_of_reply):
        if is_reply:
            messages.append(_reply(group))
            continue
        for item in group:
            if item.get("type") == "function_call_output":
                text = content_text(item.get("output"), "input", TEXTS)
                messages.append(Message("tool", text, tool_call_id=str(item.get("call_id"))))
            else:
                role = "system" if item["role"] == "developer" else item["role"]
                messages.append(Message(role, content_text(item.get("content"), "input", TEXTS)))
    return messages


def _is_of_reply(item: dict[str, Any]) -> bool:
    """Whether an input item is a part of a reply. Raises APIError for an item that is not supported."""
    kind, role = item.get("type", "message"), item.get("role", "assistant")
    if kind == "message" and role not in ("user", "system", "developer", "assistant"):
        raise APIError(400, f"input: there is no role {shown(role)}", parameter="input")
    if kind not in ("message", "function_call", "function_call_output", "reasoning"):
        raise APIError(400, f"input: an item of type {shown(kind)} is not supported here", parameter="input")
    return kind in ("function_call", "reasoning") or (kind == "message" and role == "assistant")


def _reply(items: Iterable[dict[str, Any]]) -> Message:
    """The reply of these items."""
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for item in items:
        if item.get("type") == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            calls.append(call_of({"id": item.get("call_id"), "type": "function", "function": function}, "input"))
        elif item.get("type") == "reasoning":
            thoughts.append(content_text(item.get("content") or item.get("summary"), "input", TEXTS))
        else:
            texts.append(content_text(item.get("content"), "input", TEXTS))
    return Message("assistant", "".join(texts), calls, reasoning="".join(thoughts) or None)


def _items(reply: Reply) -> list[dict[str, Any]]:
    message, items = reply.message, list[dict[str, Any]]()
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": new_id("rs_"), "summary": summary})
    if message.text or not message.tool_calls:
        content = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        status = "incomplete" if reply.finish == "length" else "completed"
        said = {"type": "message", "id": new_id("msg_"), "role": "assistant", "status": status, "content": [content]}
        items.append(said)
    return items + [_call_item(call) for call in message.tool_calls]


def _call_item(call: ToolCall) -> dict[str, Any]:
    item = {"type": "function_call", "id": new_id("fc_"), "call_id": call.id, "name": call.name}
    return {**item, "arguments": json_arguments(call), "status": "completed"}


def _stream(whole: dict[str, Any]) -> HTTPResponse:
    """The response as server-sent events, each item in one piece."""
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events: list[dict[str, Any]] = [
        {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
    ]
    for place, item in enumerate(whole["output"]):
        events += _item_events(item, place)
    events.append({"type": f"response.{whole['status']}", "response": whole})
    for number, event in enumerate(events):
        event["sequence_number"] = number
    return event_stream([(event["type"], event) for event in events])


def _item_events(item: dict[str, Any], place: int) -> Iterator[dict[str, Any]]:
    at: dict[str, Any] = {"item_id": item["id"], "output_index": place}
    empty: dict[str, dict[str, Any]] = {
        "message": {"content": []},
        "function_call": {"arguments": ""},
        "reasoning": {"summary": []},
    }
    added = {**item, **empty[item["type"]]} | ({} if item["type"] == "reasoning" else {"status": "in_progress"})
    yield {"type": "response.output_item.added", "output_index": place, "item": added}
    if item["type"] == "message":
        (part,) = item["content"]
        at["content_index"] = 0
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **at, "part": part}
    elif item["type"] == "function_call":
        yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **at, **done}
    yield {"type": "response.output_item.done", "output_index": place, "item": item}
