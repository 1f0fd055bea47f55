"""OpenAI's Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from rollouts.gateway.exchange import (
    CHOICES_MAX,
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
from rollouts.types import Message


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


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """The keys of a request. The last ones, from `user` on, are accepted and ignored."""

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
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    verbosity: Any = None


def read(body: bytes) -> Request:
    """The request. Raises APIError."""
    given = read_body(body, _Body)
    if not given.messages:
        raise APIError(400, "messages is empty", parameter="messages")
    stops = [given.stop] if isinstance(given.stop, str) else given.stop or []
    check_lengths("messages", given.messages, (said.tool_calls or () for said in given.messages), given.tools, stops)
    cannot = {
        "top_logprobs": bool(given.top_logprobs),
        "logit_bias": bool(given.logit_bias),
        "modalities": given.modalities not in (None, ["text"]),
    }
    if given.response_format not in (None, {"type": "text"}):
        raise APIError(400, f"response_format {NO_SCHEMA}", parameter="response_format")
    for key, is_asked in cannot.items():
        if is_asked:
            raise APIError(400, f"{key} is not supported here; leave it out", parameter=key)
    check_range("temperature", given.temperature, 0.0, 100.0)
    check_range("n", given.n, 1, CHOICES_MAX)
    check_range("max_tokens", given.max_tokens, 1, TOKENS_MAX)
    check_range("max_completion_tokens", given.max_completion_tokens, 1, TOKENS_MAX)
    tools = [_schema(tool) for tool in given.tools or []]
    sampling = {
        "top_p": given.top_p not in (None, 1),
        "frequency_penalty": bool(given.frequency_penalty),
        "presence_penalty": bool(given.presence_penalty),
        "tool_choice": given.tool_choice not in (None, "auto", "none"),
    }
    asked = Asked(
        [_message(said) for said in given.messages],
        [] if given.tool_choice == "none" else tools,
        given.max_completion_tokens or given.max_tokens,
        given.temperature,
        given.seed,
        stops,
        given.n or 1,
        bool(given.logprobs),
        [key for key, is_asked in sampling.items() if is_asked],
    )
    with_usage = given.stream_options is not None and given.stream_options.include_usage
    return Request(asked, given.model, bool(given.stream), {"with_usage": with_usage})


def write(request: Request, answered: Answered, model: str) -> HTTPResponse:
    """The response."""
    sampled = sum(reply.tokens for reply in answered.replies)
    usage = {
        "prompt_tokens": answered.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answered.prompt_tokens + sampled,
    }
    whole = {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(place, reply, request.asked) for place, reply in enumerate(answered.replies)],
        "usage": usage,
    }
    return _stream(whole, with_usage=request.echo["with_usage"]) if request.stream else as_json(whole)


def refuse(error: APIError) -> HTTPResponse:
    """An error response in OpenAI's format."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body = {"message": str(error), "type": kind, "param": error.parameter, "code": error.code}
    return as_json({"error": body}, error.status)


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise APIError(400, 'tools: a tool is {"type": "function", "function": {"name": ...}}', parameter="tools")
    function_schema(function.get("name"), function.get("description"), function.get("parameters"))
    return tool


def _message(said: _Said) -> Message:
    calls = [call_of(msgspec.to_builtins(call), "messages") for call in said.tool_calls or ()]
    role = "system" if said.role == "developer" else said.role
    return Message(
        role, content_text(said.content, "messages"), calls, said.tool_call_id, said.name, said.reasoning_content
    )


def _choice(place: int, reply: Reply, asked: Asked) -> dict[str, Any]:
    message = reply.message
    said: dict[str, Any] = {
        "role": "assistant",
        "content": message.text if message.text or not message.tool_calls else None,
    }
    if message.reasoning:
        said["reasoning_content"] = message.reasoning
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json_arguments(call)}}
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
