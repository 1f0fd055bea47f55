"""Any chat-completions API as an engine for evaluation: OpenAI's, OpenRouter's, vLLM's, SGLang's, llama.cpp's.

    rollouts eval --env calculator --inference openai --inference.url http://127.0.0.1:8000/v1 --model policy

Messages and tool schemas go out, the assistant's message comes back: its text, its reasoning where the server tells it
apart, its tool calls. There are no token ids, so nothing can be trained on what it says; trajectories hold messages and
the server's own counts of tokens. Of the base install only: no torch, no tokenizer. Left out: streaming, several
choices, images, and giving earlier reasoning back (servers disagree about it).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, Self
from urllib.parse import urlsplit

import msgspec

from rollouts.chat.families import read_call
from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, Generation, Health, WeightUpdate
from rollouts.inference.chatting import ChatReply, ChatRequest, evaluation_only
from rollouts.inference.http.client import HTTPClient, Retries
from rollouts.inference.http.failures import HTTPFailure, message_of
from rollouts.plugins.checks import checked_by
from rollouts.types import Message, ToolCall

__all__ = ["OPENAI_URL", "OpenAIInference", "create_openai_inference"]

OPENAI_URL = "https://api.openai.com/v1"
COMPLETIONS = "/chat/completions"
CHECK_SECONDS = 120.0  # a server may load its model when it is asked first
CHECK_TOKENS = 16  # some models refuse to say less
UNBOUNDED = 2**31 - 1
SEEDS = 2**31  # what every server takes
_TOO_LONG = re.compile(r"context[ _-]?(length|size|window)|prompt is too long", re.IGNORECASE)
_OWN_KEYS = ("messages", "model", "n", "stream", "tools")


# --- what is answered -------------------------------------------------------------------------------------------------


class _Said(msgspec.Struct, frozen=True):
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Said
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None  # some servers tell errors with status 200


# --- the engine -------------------------------------------------------------------------------------------------------


class OpenAIInference:
    """Implements InferenceBackend and CanChat for one chat-completions API.

    `connections_max` requests are in flight at most; the rest wait their turn. `key_name` is the environment variable
    that the key came from, for messages (empty: there is no key).
    """

    trainable = False
    in_process = False
    owns_weights = False
    weights_kind: Literal["full", "adapter"] = "full"
    context_tokens_max = UNBOUNDED  # the server's business
    version = 0

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str = "",
        key_name: str = "",
        stop: Sequence[str] = (),
        body: Mapping[str, Any] | None = None,
        leave_out: Sequence[str] = (),
        connections_max: int = 64,
        request_seconds: float = 600.0,
        retries: Retries = Retries(),  # noqa: B008 - a NamedTuple cannot be changed
        seed: int = 0,
    ) -> None:
        self.model = model
        self._api_key, self._key_name = api_key, key_name
        self._stop, self._body, self._leave_out = list(stop), dict(body or {}), frozenset(leave_out)
        self._request_seconds = request_seconds
        self._client = HTTPClient(url, api_key=api_key, connections_max=connections_max, retries=retries, seed=seed)
        self.url = self._client.url
        self._limit_name = "max_tokens"
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"{self.model} at {self.url}"

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._client.close()

    # --- speaking -----------------------------------------------------------------------------------------------------

    async def chat(self, request: ChatRequest) -> ChatReply:
        """The reply to a conversation.

        Raises InferenceError: no usable answer, after as many attempts as are allowed (`is_transient` False: asking
        again would not help). A first turn that is too long for the model's context is one too: nothing was said yet.
        """
        try:
            completion = await self._ask(self._client, request, self._request_seconds)
        except HTTPFailure as failure:
            has_spoken = any(message.role == "assistant" for message in request.messages)
            if failure.status == 400 and has_spoken and _TOO_LONG.search(str(failure)):
                return ChatReply(Message("assistant"), "context", detail=str(failure))
            raise InferenceError(str(failure), is_transient=failure.retryable) from failure
        return self._read(completion)

    async def check(self, tools: Sequence[dict[str, Any]] = (), temperature: float = 1.0) -> None:
        """Ask for a few tokens, as the run will. Raises ConfigError where that is refused, with what to type."""
        request = ChatRequest([Message("user", "Say hello.")], list(tools), CHECK_TOKENS, 0, temperature)
        async with HTTPClient(self.url, api_key=self._api_key, connections_max=1) as client:
            try:
                try:
                    completion = await self._ask(client, request, CHECK_SECONDS)
                except HTTPFailure as failure:
                    if failure.status != 400 or "max_completion_tokens" not in str(failure):
                        raise
                    self._limit_name = "max_completion_tokens"  # what OpenAI's newer models call it
                    completion = await self._ask(client, request, CHECK_SECONDS)
            except HTTPFailure as failure:
                raise ConfigError(self._refusal(failure)) from failure
            try:
                self._read(completion)
            except InferenceError as error:
                raise ConfigError(f"{self!r} cannot be used: {error}") from error

    async def _ask(self, client: HTTPClient, request: ChatRequest, seconds: float) -> _Completion:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [_message_body(message) for message in request.messages],
            self._limit_name: request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed % SEEDS,
        }
        if request.tools:
            body["tools"] = request.tools
        if self._stop:
            body["stop"] = self._stop
        body |= self._body
        body = {key: value for key, value in body.items() if key not in self._leave_out}
        return await client.post(COMPLETIONS, body, _Completion, timeout_seconds=seconds)

    def _read(self, completion: _Completion) -> ChatReply:
        """The only choice as a message. Raises InferenceError."""
        choices = completion.choices or []
        if len(choices) != 1:
            told = f": {message_of({'error': completion.error})}" if completion.error else ""
            raise InferenceError(f"{self.url} was asked for one answer and returned {len(choices)}{told}")
        (choice,) = choices
        if choice.finish_reason == "error":
            raise InferenceError(f"{self.url} ended its answer with an error")
        said, usage = choice.message, completion.usage or _Usage()
        calls = [_identified(read_call(raw), place) for place, raw in enumerate(said.tool_calls or ())]
        reasoning = said.reasoning_content or said.reasoning or None
        message = Message("assistant", said.content or "", calls, reasoning=reasoning)
        finish: Literal["stop", "length"] = "length" if choice.finish_reason == "length" else "stop"
        return ChatReply(message, finish, usage.prompt_tokens, usage.completion_tokens)

    def _refusal(self, failure: HTTPFailure) -> str:
        """Why the first request was refused, and what to do about it."""
        words = f"{self!r} cannot be used: {failure}"
        if failure.status in (401, 403) and self._key_name:
            return (
                f"{words}\nthe API key in the environment variable {self._key_name} is refused; see whether it is right"
            )
        if failure.status in (401, 403):
            return f"{words}\nput an API key into an environment variable, and type --inference.api-key-env ITS_NAME"
        if failure.status == 404:
            return (
                f"{words}\nsee whether the server has the model {self.model!r} (else type --model, or "
                "--inference.served-model), and whether the URL is the one before /chat/completions: it mostly ends in "
                "/v1"
            )
        if "tool" in str(failure) and failure.status == 400:
            return (
                f"{words}\nthe environment has tools, and this server refuses them; vLLM wants "
                "--enable-auto-tool-choice --tool-call-parser hermes (or the model's own), SGLang --tool-call-parser"
            )
        if failure.kind in ("refused", "reset", "timeout"):
            return f"{words}\nsee whether the server runs, and whether this is its URL: --inference.url"
        if failure.kind == "garbage":
            return f"{words}\nwhat answers there is no chat-completions API; see --inference.url"
        if failure.status == 400:
            return f"{words}\n--inference.leave-out '[\"seed\"]' leaves keys out, --inference.body.KEY VALUE adds some"
        return words

    # --- what every engine has ----------------------------------------------------------------------------------------

    def open_session(self, order: tuple[int, ...]) -> str:
        """A name for the episode; the server knows nothing of it."""
        return f"{'-'.join(map(str, order))}-{next(self._numbers)}"

    def close_session(self, session: str) -> None:
        """Nothing is kept for a session."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises InferenceError: there are no token ids here."""
        self._refuse()

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Raises InferenceError, as `generate`."""
        self._refuse()

    async def update_weights(self, update: WeightUpdate) -> None:
        """Raises InferenceError: whoever serves the model serves it as it is."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InferenceError(
            f"{self!r} is a chat API: it takes messages, and returns no token ids with logprobs", is_transient=False
        )

    async def health(self) -> Health:
        """Whether it answers a request for a few tokens."""
        try:
            await self.check()
        except ConfigError as error:
            return Health(False, 0, str(error))
        return Health(True, 0)


# --- composing --------------------------------------------------------------------------------------------------------


def _check(values: Mapping[str, Any]) -> None:
    """What can be seen before anybody is asked. Raises ConfigError."""
    model, url = values["served_model"] or values["model"], values["url"]
    if not model or (model == "tiny" and not values["served_model"]):
        raise ConfigError(
            "--inference openai: name the model as its server knows it, such as --model gpt-4.1-mini; for a server "
            f"that really calls its own {model or 'model'!r}, type --inference.served-model {model or 'NAME'}"
        )
    if values["training"] is not None:
        raise ConfigError(
            "--inference openai: a chat API returns no token ids with logprobs, so nothing can be trained on what it "
            "says; type --inference hf to train, or `rollouts eval` to evaluate"
        )
    taken = [key for key in values["body"] or {} if key in _OWN_KEYS]
    if taken:
        raise ConfigError(f"--inference.body.{taken[0]}: it is decided by the run; leave it out")
    _key_of(values["api_key_env"], url)
    HTTPClient(url)


def _key_of(name: str, url: str) -> tuple[str, str]:
    """The API key and the name of its variable. Raises ConfigError where there should be one and is none.

    OpenAI's own key goes to OpenAI only, unless its variable is named.
    """
    is_openai = urlsplit(url).hostname == urlsplit(OPENAI_URL).hostname
    name = name or ("OPENAI_API_KEY" if is_openai else "")
    key = os.environ.get(name, "").strip() if name else ""
    if name and not key:
        raise ConfigError(
            f"the environment variable {name} holds no API key, and {url} is asked with one; type: export {name}=... "
            "(or name another variable with --inference.api-key-env, or another server with --inference.url)"
        )
    return key, name


@checked_by(_check)
@evaluation_only
def create_openai_inference(
    model: str,
    training: Any,
    seed: int,
    *,
    url: str = OPENAI_URL,
    api_key_env: str = "",
    served_model: str = "",
    stop: tuple[str, ...] = (),
    body: dict[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    connections: int = 64,
    request_seconds: float = 600.0,
    attempts: int = 6,
) -> OpenAIInference:
    """Any chat-completions API, for evaluation only.

    Args:
        url: What comes before /chat/completions; it mostly ends in /v1.
        api_key_env: The environment variable with the API key. Empty: OPENAI_API_KEY at api.openai.com, none elsewhere.
        served_model: The name that the server has for the model; empty: that of --model.
        stop: Texts that end a reply.
        body: More keys of each request, such as top_p or reasoning_effort.
        leave_out: Keys that the server does not take, and that are not sent: seed, say, or temperature.
        connections: Requests that may be in flight at once.
        request_seconds: How long one reply may take, with all attempts.
        attempts: How often a request that failed for the moment is asked.

    Raises ConfigError.
    """
    url = url.rstrip("/").removesuffix(COMPLETIONS)
    given = {"model": model, "served_model": served_model, "url": url, "api_key_env": api_key_env}
    _check({**given, "training": training, "body": body})
    if connections < 1 or attempts < 1 or not request_seconds > 0:
        raise ConfigError(
            "--inference.connections, --inference.attempts and --inference.request-seconds must be at least 1; got "
            f"{connections}, {attempts} and {request_seconds:g}"
        )
    key, name = _key_of(api_key_env, url)
    return OpenAIInference(
        url,
        served_model or model,
        api_key=key,
        key_name=name,
        stop=stop,
        body=body,
        leave_out=leave_out,
        connections_max=connections,
        request_seconds=request_seconds,
        retries=Retries(attempts, longest_seconds=30.0),
        seed=seed,
    )


def _message_body(message: Message) -> dict[str, Any]:
    """A message as the API takes it. A call that could not be read is shown without arguments."""
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["content"] = message.content or None
        body["tool_calls"] = [_call_body(call) for call in message.tool_calls]
    if message.role == "tool":
        body["tool_call_id"] = message.tool_call_id or ""
    elif message.name:
        body["name"] = message.name
    return body


def _call_body(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()}
    return {"id": call.id, "type": "function", "function": function}


def _identified(call: ToolCall, place: int) -> ToolCall:
    """With an id, which the answer to it must name."""
    return call if call.id else msgspec.structs.replace(call, id=f"call_{place}")
