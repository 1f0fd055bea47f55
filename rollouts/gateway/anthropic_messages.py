"""Anthropic's Messages: `POST /v1/messages`, and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import functools
from typing import Any, Literal

import msgspec

from rollouts.author_code import shown
from rollouts.bounds import call_arguments
from rollouts.gateway import exchange
from rollouts.gateway.exchange import Answered, APIError, Asked, ClientAPI, ClientReply, ClientRequest, mistake_in
from rollouts.gateway.http_server import HTTPResponse, as_json, event_stream
from rollouts.types import Message, ToolCall


class _Said(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"] = "auto"


class _Keys(msgspec.Struct):
    messages: list[_Said]
    max_tokens: int | None = None
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    output_config: dict[str, Any] | None = None
    compaction: Any = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    thread: Any = None


_IGNORED = """
metadata service_tier thinking context_management cache_control betas billing_policy diagnostics fallbacks
inference_geo speed user_profile_id
"""


def _read(body: bytes, *, is_count: bool = False) -> ClientRequest:
    """The request. `is_count`: it asks for the number of tokens only."""
    given = exchange.read_body(body, _Keys, _IGNORED)
    if given.max_tokens is None and not is_count:
        raise mistake_in("max_tokens", "the body cannot be read: Object missing required field `max_tokens`")
    if not given.messages:
        raise mistake_in("messages", "messages is empty")
    blocks = (said.content for said in given.messages if isinstance(said.content, list))
    exchange.check_lengths("messages", given.messages, blocks, given.tools, given.stop_sequences or [])
    if (given.output_config or {}).get("format") is not None:
        raise mistake_in("output_config", f"output_config.format {exchange.NO_SCHEMA}")
    exchange.refuse_unsupported(
        compaction=bool(given.compaction), container=bool(given.container), mcp_servers=bool(given.mcp_servers)
    )
    if given.thread is not None:  # with this code, the package sends the whole conversation instead
        words = "thread is not supported here; send the whole conversation in messages"
        raise mistake_in("thread", words, code="thread_unsupported_request")
    exchange.check_ranges(given, temperature=(0, 100), max_tokens=(1, exchange.TOKENS_MAX))
    system = exchange.content_text(given.system, "system")
    messages = [Message("system", system)] if system else []
    for said in given.messages:
        messages += _messages(said)
    choice = given.tool_choice.type if given.tool_choice else "auto"
    asked = Asked(
        messages,
        [] if choice == "none" else [_schema(tool) for tool in given.tools or []],
        given.max_tokens,
        given.temperature,
        stop=given.stop_sequences or [],
        count=0 if is_count else 1,
        unsupported=exchange.unsupported(
            top_p=given.top_p not in (None, 1), top_k=given.top_k is not None, tool_choice=choice in ("any", "tool")
        ),
    )
    return ClientRequest(asked, given.model, bool(given.stream))


def _write(request: ClientRequest, answered: Answered, model: str) -> HTTPResponse:
    (reply,) = answered.replies
    ends = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    whole = {
        "id": exchange.new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(reply),
        "stop_reason": "stop_sequence" if reply.stop is not None else ends[reply.finish],
        "stop_sequence": reply.stop,
        "usage": {"input_tokens": answered.prompt_tokens, "output_tokens": reply.tokens},
    }
    return _stream(whole) if request.stream else as_json(whole)


def _refuse(error: APIError) -> HTTPResponse:
    """An error response in Anthropic's format. Its package reads the code of an error in `details`. The message names
    the parameter.
    """
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"details": {"error_code": error.code}} if error.code else {}
    words = str(error)
    if error.parameter and error.parameter not in words:
        words = f"{error.parameter}: {words}"
    return as_json({"type": "error", "error": {"type": kind, "message": words, **details}}, error.status)


def _schema(tool: _Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        kind = f"the tool {shown(tool.name)} is of type {shown(tool.type)}"
        raise mistake_in("tools", f"tools: {kind}, which runs on Anthropic's servers; define your own")
    return exchange.function_schema(tool.name, tool.description, tool.input_schema)


def _messages(said: _Said) -> list[Message]:
    """The messages of one turn. Results of tools become messages of their own."""
    if isinstance(said.content, str):
        return [Message(said.role, said.content)]
    texts: list[dict[str, Any]] = []
    results, calls, thoughts = list[Message](), list[ToolCall](), list[str]()
    for block in said.content:
        kind = block.get("type")
        if kind == "tool_result":
            text = exchange.content_text(block.get("content"), "messages")
            results.append(Message("tool", text, tool_call_id=str(block.get("tool_use_id"))))
        elif kind == "tool_use" and not isinstance(arguments := call_arguments(block.get("input")), str):
            calls.append(ToolCall(str(block.get("name")), arguments, str(block.get("id", ""))))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        else:
            texts.append(block)
    text, reasoning = exchange.content_text(texts, "messages"), "".join(thoughts) or None
    if said.role == "assistant":
        return [Message("assistant", text, calls, reasoning=reasoning)]
    return [*results, *([Message(said.role, text)] if text or not results else [])]


def _blocks(reply: ClientReply) -> list[dict[str, Any]]:
    message, blocks = reply.message, list[dict[str, Any]]()
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.text or not message.tool_calls:
        blocks.append({"type": "text", "text": message.text})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
    return blocks


def _stream(whole: dict[str, Any]) -> HTTPResponse:
    """The message as server-sent events, each block in one piece."""
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**whole["usage"], "output_tokens": 0}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for place, block in enumerate(whole["content"]):
        if block["type"] == "tool_use":
            key, delta = "input", {"type": "input_json_delta", "partial_json": exchange.json_text(block["input"])}
        else:
            key = block["type"]
            delta = {"type": f"{key}_delta", key: block[key]}
        events += [
            {
                "type": "content_block_start",
                "index": place,
                "content_block": {**block, key: {} if key == "input" else ""},
            },
            {"type": "content_block_delta", "index": place, "delta": delta},
            {"type": "content_block_stop", "index": place},
        ]
    ended = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    events.append({"type": "message_delta", "delta": ended, "usage": whole["usage"]})
    events.append({"type": "message_stop"})
    return event_stream([(event["type"], event) for event in events])


MESSAGES = ClientAPI(_read, _write, _refuse)
COUNT_TOKENS = ClientAPI(
    functools.partial(_read, is_count=True),
    lambda request, answered, model: as_json({"input_tokens": answered.prompt_tokens}),
    _refuse,
)
