"""OpenAI's Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from rollouts.gateway import exchange
from rollouts.gateway.exchange import Answered, APIError, Asked, ClientAPI, ClientReply, ClientRequest, mistake_in
from rollouts.gateway.http_server import HTTPResponse, as_json, event_stream
from rollouts.types import Message

CHOICES_MAX = 64


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"


class _Said(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Keys(msgspec.Struct):
    messages: list[_Said]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None
    modalities: list[str] | None = None


_IGNORED = """
user metadata store service_tier parallel_tool_calls reasoning_effort safety_identifier prompt_cache_key
prompt_cache_options prompt_cache_retention prediction verbosity
"""


def _read(body: bytes) -> ClientRequest:
    given = exchange.read_body(body, _Keys, _IGNORED)
    if not given.messages:
        raise mistake_in("messages", "messages is empty")
    stops = [given.stop] if isinstance(given.stop, str) else given.stop or []
    calls = (said.tool_calls or () for said in given.messages)
    exchange.check_lengths("messages", given.messages, calls, given.tools, stops)
    exchange.refuse_format("response_format", given.response_format)
    exchange.refuse_unsupported(
        top_logprobs=bool(given.top_logprobs),
        logit_bias=bool(given.logit_bias),
        modalities=given.modalities not in (None, ["text"]),
    )
    lengths = (1, exchange.TOKENS_MAX)
    exchange.check_ranges(
        given, temperature=(0, 100), n=(1, CHOICES_MAX), max_tokens=lengths, max_completion_tokens=lengths
    )
    tools = [_schema(tool) for tool in given.tools or []]
    asked = Asked(
        [_message(said) for said in given.messages],
        [] if given.tool_choice == "none" else tools,
        given.max_completion_tokens or given.max_tokens,
        given.temperature,
        given.seed,
        stops,
        given.n or 1,
        bool(given.logprobs),
        exchange.unsupported(
            top_p=given.top_p not in (None, 1),
            frequency_penalty=bool(given.frequency_penalty),
            presence_penalty=bool(given.presence_penalty),
            tool_choice=given.tool_choice not in (None, "auto", "none"),
        ),
    )
    with_usage = given.stream_options is not None and given.stream_options.include_usage
    return ClientRequest(asked, given.model, bool(given.stream), {"with_usage": with_usage})


def _write(request: ClientRequest, answered: Answered, model: str) -> HTTPResponse:
    sampled = sum(reply.tokens for reply in answered.replies)
    whole = {
        "id": exchange.new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(place, reply, request.asked) for place, reply in enumerate(answered.replies)],
        "usage": {
            "prompt_tokens": answered.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": answered.prompt_tokens + sampled,
        },
    }
    return _stream(whole, with_usage=request.echo["with_usage"]) if request.stream else as_json(whole)


def refuse_as_openai(error: APIError) -> HTTPResponse:
    """An error response in OpenAI's format."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body = {"message": str(error), "type": kind, "param": error.parameter, "code": error.code}
    return as_json({"error": body}, error.status)


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise mistake_in("tools", 'tools: a tool is {"type": "function", "function": {"name": ...}}')
    exchange.function_schema(function.get("name"), function.get("description"), function.get("parameters"))
    return tool


def _message(said: _Said) -> Message:
    calls = [exchange.call_of(msgspec.to_builtins(call), "messages") for call in said.tool_calls or ()]
    role, text = "system" if said.role == "developer" else said.role, exchange.content_text(said.content, "messages")
    return Message(role, text, calls, said.tool_call_id, said.name, said.reasoning_content)


def _choice(place: int, reply: ClientReply, asked: Asked) -> dict[str, Any]:
    message = reply.message
    text = message.text if message.text or not message.tool_calls else None
    said: dict[str, Any] = {"role": "assistant", "content": text}
    if message.reasoning:
        said["reasoning_content"] = message.reasoning
    if message.tool_calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": exchange.json_text(call.arguments)},
            }
            for call in message.tool_calls
        ]
    choice: dict[str, Any] = {"index": place, "message": said, "finish_reason": reply.finish, "logprobs": None}
    if asked.logprobs:
        choice["logprobs"] = {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in reply.logprobs
            ]
        }
    return choice


def _stream(whole: dict[str, Any], *, with_usage: bool) -> HTTPResponse:
    """The reply as server-sent events: each choice in one piece, then why it ended."""
    base = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    events: list[dict[str, Any]] = []
    for choice in whole["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        first = {"index": choice["index"], "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
        last = {"index": choice["index"], "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
        events += [{**base, "choices": [first]}, {**base, "choices": [last]}]
    if with_usage:
        events.append({**base, "choices": [], "usage": whole["usage"]})
    return event_stream([("", event) for event in events], end=b"data: [DONE]\n\n")


CHAT_COMPLETIONS = ClientAPI(_read, _write, refuse_as_openai)
