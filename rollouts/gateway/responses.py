"""OpenAI's Responses: `POST /v1/responses`.

`previous_response_id` continues an earlier response of the same server. The last `EARLIER_MAX` responses are kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rollouts.chat.tool_call_formats import read_call
from rollouts.gateway.exchange import (
    NO_SCHEMA,
    TOKENS_MAX,
    Answered,
    APIError,
    Asked,
    Reply,
    Request,
    arguments_of,
    as_json,
    check_range,
    event_stream,
    function_schema,
    new_id,
    read_body,
    text_of,
)
from rollouts.gateway.http_server import HTTPResponse
from rollouts.types import Message, ToolCall

EARLIER_MAX = 1000
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
            words = f"there is no earlier response {previous!r} here; send the whole conversation in input"
            raise APIError(404, words, parameter="previous_response_id")
        before = earlier[previous]
    items = [{"role": "user", "content": given.input}] if isinstance(given.input, str) else given.input
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
        words = f"a tool of type {tool.get('type')!r} runs on OpenAI's servers; define it as a function"
        raise APIError(400, words, parameter="tools")
    return function_schema(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _messages(items: list[dict[str, Any]]) -> list[Message]:
    """The messages of input items. The items of one reply (reasoning, text, calls) become one message."""
    messages: list[Message] = []
    is_open = False  # whether the last message is a reply that further items belong to
    for item in items:
        kind = item.get("type", "message")
        role = item.get("role", "assistant")
        if kind == "function_call_output":
            output = item.get("output")
            text = text_of(output, TEXTS) if isinstance(output, str | list | None) else ""
            messages.append(Message("tool", text, tool_call_id=str(item.get("call_id"))))
        elif kind == "message" and role in ("user", "system", "developer"):
            role = "system" if role == "developer" else role
            messages.append(Message(role, text_of(item.get("content"), TEXTS)))
        elif kind in ("message", "function_call", "reasoning"):
            if not is_open:
                messages.append(Message("assistant"))
            messages[-1] = _joined(messages[-1], item, kind)
            is_open = True
            continue
        else:
            words = f"an input item of type {kind!r} is not supported here"
            raise APIError(400, words, parameter="input")
        is_open = False
    return messages


def _joined(reply: Message, item: dict[str, Any], kind: str) -> Message:
    """The reply with one more item."""
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = read_call({"id": item.get("call_id"), "type": "function", "function": function})
        return msgspec.structs.replace(reply, tool_calls=[*reply.tool_calls, call])
    if kind == "reasoning":
        thought = text_of(item.get("content") or item.get("summary"), TEXTS)
        return msgspec.structs.replace(reply, reasoning=(reply.reasoning or "") + thought or None)
    content = item.get("content")
    return msgspec.structs.replace(reply, content=reply.text + text_of(content, TEXTS))


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
    return {**item, "arguments": arguments_of(call), "status": "completed"}


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
