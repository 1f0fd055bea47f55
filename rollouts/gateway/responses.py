"""OpenAI's Responses: `POST /v1/responses`.

`previous_response_id` continues an earlier response of the same server (`Responses`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rollouts.author_code import shown
from rollouts.gateway import exchange
from rollouts.gateway.chat_completions import refuse_as_openai
from rollouts.gateway.exchange import Answered, APIError, Asked, ClientAPI, ClientReply, ClientRequest, mistake_in
from rollouts.gateway.http_server import HTTPResponse, as_json, event_stream
from rollouts.types import Message, ToolCall

EARLIER_MAX = 1000
EARLIER_CHARACTERS_MAX = 64 << 20
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class _Text(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: Any = None


class _Keys(msgspec.Struct):
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
    metadata: Any = None  # repeated in the response


_IGNORED = """
store include context_management max_tool_calls parallel_tool_calls prompt_cache_key prompt_cache_options
prompt_cache_retention reasoning safety_identifier service_tier stream_options truncation user
"""
_ECHOED = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p")


class Responses:
    """The API of one server, which keeps the conversations of the last responses, by their ids: at most `EARLIER_MAX`
    of them, and, but for the last one, with `EARLIER_CHARACTERS_MAX` characters in all.
    """

    def __init__(self) -> None:
        self._earlier: dict[str, list[Message]] = {}
        self._sizes: dict[str, int] = {}
        self.api = ClientAPI(self._read, self._write, refuse_as_openai, "input")

    def _read(self, body: bytes) -> ClientRequest:
        given = exchange.read_body(body, _Keys, _IGNORED)
        exchange.refuse_format("text.format", given.text.format if given.text is not None else None)
        exchange.refuse_unsupported(
            top_logprobs=bool(given.top_logprobs),
            background=bool(given.background),
            conversation=given.conversation is not None,
            prompt=given.prompt is not None,
        )
        exchange.check_ranges(given, temperature=(0, 100), max_output_tokens=(1, exchange.TOKENS_MAX))
        before: list[Message] = []
        if (previous := given.previous_response_id) is not None:
            if previous not in self._earlier:
                words = f"there is no earlier response {shown(previous)} here; send the whole conversation in input"
                raise APIError(404, words, parameter="previous_response_id")
            before = self._earlier[previous]
        items = [{"role": "user", "content": given.input}] if isinstance(given.input, str) else given.input
        exchange.check_lengths("input", [*before, *items], (), given.tools)
        messages = [*before, *_messages(items)]
        if not messages:
            raise mistake_in("input", "input is empty")
        if given.instructions:
            messages = [Message("system", given.instructions), *messages]
        tools = [_schema(tool) for tool in given.tools or []]
        asked = Asked(
            messages,
            [] if given.tool_choice == "none" else tools,
            given.max_output_tokens,
            given.temperature,
            unsupported=exchange.unsupported(
                top_p=given.top_p not in (None, 1), tool_choice=given.tool_choice not in (None, "auto", "none")
            ),
        )
        echo = {name: getattr(given, name) for name in _ECHOED} | {"metadata": given.metadata or {}}
        echo |= {"tools": given.tools or [], "tool_choice": given.tool_choice or "auto"}
        return ClientRequest(asked, given.model, bool(given.stream), echo)

    def _write(self, request: ClientRequest, answered: Answered, model: str) -> HTTPResponse:
        (reply,) = answered.replies
        is_cut = reply.finish == "length"
        whole = {
            "id": exchange.new_id("resp_"),
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
        # The instructions belong to this request only.
        messages = request.asked.messages[1:] if request.echo["instructions"] else request.asked.messages
        self._keep(whole["id"], [*messages, reply.message])
        return _stream(whole) if request.stream else as_json(whole)

    def _keep(self, number: str, messages: list[Message]) -> None:
        """Keep the conversation of the response with this id."""
        self._earlier[number] = messages
        self._sizes[number] = sum(len(each.text) for each in messages)
        while len(self._sizes) > EARLIER_MAX or (
            len(self._sizes) > 1 and sum(self._sizes.values()) > EARLIER_CHARACTERS_MAX
        ):
            oldest = next(iter(self._sizes))
            del self._sizes[oldest], self._earlier[oldest]


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        words = f"a tool of type {shown(tool.get('type'))} runs on OpenAI's servers; define it as a function"
        raise mistake_in("tools", f"tools: {words}")
    return exchange.function_schema(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _messages(items: list[dict[str, Any]]) -> list[Message]:
    """The messages of input items. The items of one reply (reasoning, text, calls) become one message."""
    messages: list[Message] = []
    for is_reply, group in itertools.groupby(items, _is_of_reply):
        if is_reply:
            messages.append(_reply(group))
            continue
        for item in group:
            if item.get("type") == "function_call_output":
                text = exchange.content_text(item.get("output"), "input", TEXTS)
                messages.append(Message("tool", text, tool_call_id=str(item.get("call_id"))))
            else:
                role = "system" if item["role"] == "developer" else item["role"]
                messages.append(Message(role, exchange.content_text(item.get("content"), "input", TEXTS)))
    return messages


def _is_of_reply(item: dict[str, Any]) -> bool:
    """Whether an input item is a part of a reply. Raises APIError for an item that is not supported."""
    kind, role = item.get("type", "message"), item.get("role", "assistant")
    if kind == "message" and role not in ("user", "system", "developer", "assistant"):
        raise mistake_in("input", f"input: there is no role {shown(role)}")
    if kind not in ("message", "function_call", "function_call_output", "reasoning"):
        raise mistake_in("input", f"input: an item of type {shown(kind)} is not supported here")
    return kind in ("function_call", "reasoning") or (kind == "message" and role == "assistant")


def _reply(items: Iterable[dict[str, Any]]) -> Message:
    """The reply of these items."""
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for item in items:
        if item.get("type") == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            calls.append(
                exchange.call_of({"id": item.get("call_id"), "type": "function", "function": function}, "input")
            )
        elif item.get("type") == "reasoning":
            thoughts.append(exchange.content_text(item.get("content") or item.get("summary"), "input", TEXTS))
        else:
            texts.append(exchange.content_text(item.get("content"), "input", TEXTS))
    return Message("assistant", "".join(texts), calls, reasoning="".join(thoughts) or None)


def _items(reply: ClientReply) -> list[dict[str, Any]]:
    message, items = reply.message, list[dict[str, Any]]()
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": exchange.new_id("rs_"), "summary": summary})
    if message.text or not message.tool_calls:
        content = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        status = "incomplete" if reply.finish == "length" else "completed"
        said = {"type": "message", "id": exchange.new_id("msg_"), "role": "assistant", "status": status}
        items.append({**said, "content": [content]})
    for call in message.tool_calls:
        item = {"type": "function_call", "id": exchange.new_id("fc_"), "call_id": call.id, "name": call.name}
        items.append({**item, "arguments": exchange.json_text(call.arguments), "status": "completed"})
    return items


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
    begun = {"status": "in_progress"}
    empty: dict[str, dict[str, Any]] = {
        "message": {"content": [], **begun},
        "function_call": {"arguments": "", **begun},
        "reasoning": {"summary": []},
    }
    yield {"type": "response.output_item.added", "output_index": place, "item": {**item, **empty[item["type"]]}}
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
