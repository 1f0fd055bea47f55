"""OpenAI's chat completions on an inference engine that takes token ids.

`POST /v1/chat/completions`, `GET /v1/models`, `GET /health`. The model's own chat template turns a conversation into
ids, and a reply is parsed as in an episode, so a client gets the same tool calls as training. Each choice is a session
of the engine, so choices that wait at the same time are sampled together. These get status 400: settings that the
engine does not support (top-p, penalties, logit bias, response formats), and content that is not text. With `stream`,
the whole reply comes in one piece after it is sampled. Stop texts are applied to the finished reply.
"""

from __future__ import annotations

import secrets
import time
import traceback
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import trio

from rollouts.chat.tool_call_formats import read_call
from rollouts.errors import InferenceError, ModelError
from rollouts.inference.base import GenerateRequest, Generation, InferenceBackend
from rollouts.serve.http_server import HTTPRequest, HTTPResponse
from rollouts.types import Message, ToolCall

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat

CHOICES_MAX = 64
SEEDS = 2**63


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


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


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The keys of a request. The last five, from `user` on, are accepted and ignored."""

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
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None


class APIError(Exception):
    """An error that is sent instead of a reply, in OpenAI's format."""

    def __init__(self, status: int, words: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(words)
        self.status, self.parameter, self.code = status, parameter, code


class ServedModel(NamedTuple):
    """The served model: its name for clients, its engine and chat format, and the defaults of requests. A request that
    takes more than `request_seconds` fails.
    """

    name: str
    engine: InferenceBackend
    chat: ChatFormat
    max_tokens: int = 256
    temperature: float = 1.0
    request_seconds: float = 600.0


class ChatAPI:
    """Answers requests (`http_server.Handler`)."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._created = int(time.time())
        self._requests = 0

    async def handle(self, request: HTTPRequest) -> HTTPResponse:
        """The response to any request. Mistakes of the client and failures of the engine get an error response."""
        routes = {
            "/v1/chat/completions": ("POST", self._complete),
            "/v1/models": ("GET", self._list),
            "/health": ("GET", self._health),
        }
        method, answer = routes.get(request.path.rstrip("/"), ("", None))
        try:
            if answer is None:
                raise APIError(404, f"there is no {request.path} here; there are {', '.join(routes)}")
            if request.method != method:
                raise APIError(405, f"{request.path} takes {method}, not {request.method}")
            return await answer(request)
        except APIError as error:
            return refusal(error.status, str(error), parameter=error.parameter, code=error.code)
        except Exception:  # a bug in rollouts must not end other requests
            traceback.print_exc()
            return refusal(500, "the server made a mistake; its output has the traceback")

    async def _list(self, request: HTTPRequest) -> HTTPResponse:
        model = {"id": self._model.name, "object": "model", "created": self._created, "owned_by": "rollouts"}
        model["max_model_len"] = self._model.engine.context_tokens_max
        return _json({"object": "list", "data": [model]})

    async def _health(self, request: HTTPRequest) -> HTTPResponse:
        engine = self._model.engine
        if engine.capabilities.is_pool and not (health := await engine.health()).ok:
            raise APIError(503, health.detail)
        return _json({"status": "ok"})

    async def _complete(self, request: HTTPRequest) -> HTTPResponse:
        asked = _read(request.body)
        _refuse(asked, self._model.name)
        tools = [] if asked.tool_choice == "none" else asked.tools or []
        tokens = self._encode([_message(said) for said in asked.messages], tools)
        replies = await self._sample(asked, tokens)
        choices = [self._choice(index, reply, asked, tools) for index, reply in enumerate(replies)]
        sampled = sum(len(reply.tokens) for reply in replies)
        whole = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._model.name,
            "choices": choices,
            "usage": {
                "prompt_tokens": len(tokens),
                "completion_tokens": sampled,
                "total_tokens": len(tokens) + sampled,
            },
        }
        if not asked.stream:
            return _json(whole)
        return _stream(whole, with_usage=asked.stream_options is not None and asked.stream_options.include_usage)

    def _encode(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        """The conversation as ids [L], with room for a reply."""
        chat, most = self._model.chat, self._model.engine.context_tokens_max
        # Encoding ten megabytes takes half a minute, in which no other request is answered.
        visible = sum(len(part) for message in messages for part in message.text.split())
        if visible > most * chat.characters_per_token_max:
            raise _too_long("more than", most, most)
        try:
            tokens = chat.encode_prompt(messages, tools)
        except ModelError as error:
            raise APIError(400, str(error), parameter="messages") from error
        if len(tokens) >= most:
            raise _too_long("", len(tokens), most)
        return tokens

    async def _sample(self, asked: _Asked, tokens: list[int]) -> list[Generation]:
        """One reply for each choice. Raises APIError."""
        model = self._model
        limit = asked.max_completion_tokens or asked.max_tokens or model.max_tokens
        temperature = model.temperature if asked.temperature is None else asked.temperature
        seed = secrets.randbelow(SEEDS) if asked.seed is None else asked.seed % SEEDS
        count = asked.n or 1
        self._requests += 1
        number, replies = self._requests, dict[int, Generation]()

        async def sample(place: int, session: str) -> None:
            request = GenerateRequest(
                tokens,
                min(limit, model.engine.context_tokens_max - len(tokens)),
                model.chat.stop_ids,
                (seed + place) % SEEDS,
                temperature,
                (number, place, 0),
                session,
            )
            try:
                replies[place] = await model.engine.generate(request)
            finally:
                model.engine.close_session(session)

        failure: BaseException | None = None
        with trio.move_on_after(model.request_seconds):
            sessions = [model.engine.open_session((number, place)) for place in range(count)]
            try:
                async with trio.open_nursery() as nursery:
                    for place, session in enumerate(sessions):
                        nursery.start_soon(sample, place, session)
            except* InferenceError as group:
                failure = group.exceptions[0]
        if failure is not None:
            raise APIError(500, f"the engine failed: {failure}") from failure
        if len(replies) < count:
            raise APIError(504, f"there was no reply within {model.request_seconds:g} seconds")
        return [replies[place] for place in range(count)]

    def _choice(self, index: int, reply: Generation, asked: _Asked, tools: list[dict[str, Any]]) -> dict[str, Any]:
        message = self._model.chat.parse(reply.tokens, tools)
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        text, calls = message.text, [call for call in message.tool_calls if call.error is None]
        places = [text.index(stop) for stop in stops if stop and stop in text]
        if places:
            text, calls = text[: min(places)], []
        finish = "stop" if places else "length" if reply.finish == "length" else "tool_calls" if calls else "stop"
        said: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if message.reasoning:
            said["reasoning_content"] = message.reasoning
        if calls:
            said["tool_calls"] = [_call_body(call, place) for place, call in enumerate(calls)]
        choice = {"index": index, "message": said, "finish_reason": finish, "logprobs": None}
        if asked.logprobs:
            choice["logprobs"] = {
                "content": [self._logprob(*pair) for pair in zip(reply.tokens, reply.logprobs, strict=True)]
            }
        return choice

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._model.chat.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def refusal(status: int, words: str, *, parameter: str | None = None, code: str | None = None) -> HTTPResponse:
    """An error response in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _json({"error": {"message": words, "type": kind, "param": parameter, "code": code}}, status)


def _read(body: bytes) -> _Asked:
    try:
        return msgspec.json.decode(body, type=_Asked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise APIError(400, f"the body cannot be read: {error}") from error


def _refuse(asked: _Asked, name: str) -> None:
    """Raise APIError for settings that are not supported, and for numbers out of range."""
    if asked.model is not None and asked.model != name:
        words = f"there is no model {asked.model!r} here; there is {name!r}"
        raise APIError(404, words, parameter="model", code="model_not_found")
    if not asked.messages:
        raise APIError(400, "messages is empty", parameter="messages")
    cannot = {
        "top_p": asked.top_p not in (None, 1),
        "frequency_penalty": bool(asked.frequency_penalty),
        "presence_penalty": bool(asked.presence_penalty),
        "logit_bias": bool(asked.logit_bias),
        "top_logprobs": bool(asked.top_logprobs),
        "response_format": asked.response_format not in (None, {"type": "text"}),
        "tool_choice": asked.tool_choice not in (None, "auto", "none"),
    }
    for key, is_asked in cannot.items():
        if is_asked:
            raise APIError(400, f"{key} is not supported here; leave it out", parameter=key)
    bounds = {
        "temperature": (asked.temperature, 0.0, 100.0),
        "n": (asked.n, 1, CHOICES_MAX),
        "max_tokens": (asked.max_tokens, 1, 2**31),
        "max_completion_tokens": (asked.max_completion_tokens, 1, 2**31),
    }
    for key, (value, least, most) in bounds.items():
        if value is not None and not least <= value <= most:
            raise APIError(400, f"{key} is {value}; it must be from {least:g} to {most:g}", parameter=key)
    for tool in asked.tools or []:
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise APIError(400, 'a tool is {"type": "function", "function": {"name": ...}}', parameter="tools")


def _message(said: _Said) -> Message:
    """Convert a message of the API to a Message."""
    parts = said.content if isinstance(said.content, list) else []
    if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in parts):
        raise APIError(400, "a message's content is text, or a list of parts of text", parameter="messages")
    content = "".join(part["text"] for part in parts) if parts else said.content or ""
    assert isinstance(content, str), "parts are joined"
    calls = [read_call(msgspec.to_builtins(call)) for call in said.tool_calls or ()]
    role = "system" if said.role == "developer" else said.role
    return Message(role, content, calls, said.tool_call_id, said.name, said.reasoning_content)


def _call_body(call: ToolCall, place: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()}
    return {"id": call.id or f"call_{place}", "type": "function", "function": function}


def _too_long(words: str, tokens: int, most: int) -> APIError:
    length = f"{words} {tokens}".strip()
    return APIError(
        400,
        f"the conversation has {length} tokens, and the model's context length is {most}",
        parameter="messages",
        code="context_length_exceeded",
    )


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
    lines = [b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events]
    return HTTPResponse(200, b"".join([*lines, b"data: [DONE]\n\n"]), "text/event-stream")


def _json(value: Any, status: int = 200) -> HTTPResponse:
    return HTTPResponse(status, msgspec.json.encode(value))
