"""An engine for evaluation over any chat-completions API: OpenAI, OpenRouter, vLLM, SGLang, llama.cpp.

    rollouts eval --env calculator --inference openai --inference.url http://127.0.0.1:8000/v1 --model policy

The engine sends messages and tool schemas. It receives the assistant's message: text, reasoning (if the server returns
it separately), and tool calls. There are no token ids, so you cannot train on the replies. Trajectories contain
messages and the server's token counts. It needs only the base install: no torch, no tokenizer. Streaming, several
choices, images, and sending earlier reasoning back are not supported.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self

import msgspec
import trio
from msgspec import Meta

from rollouts.chat.tool_call_formats import read_call, typed
from rollouts.data.conversations import BadRowError, read_message
from rollouts.errors import BudgetSpentError, ConfigError, InferenceError
from rollouts.inference.base import Capabilities, Health, Spending
from rollouts.inference.chatting import ChatReply, ChatRequest, evaluation_only
from rollouts.models.loading import BUNDLED
from rollouts.plugins.checks import check_bounds, checked_by
from rollouts.types import Message
from rollouts_servers.http import HTTPFailure, ProxyClient, Retries, error_message, read_url
from rollouts_servers.spending import (
    SpendingStore,
    check_file,
    check_prices,
    input_tokens_at_most,
    price,
    spent_words,
)

OPENAI_URL = "https://api.openai.com/v1"
COMPLETIONS = "/chat/completions"
CHECK_SECONDS = 120.0  # a server may load its model at the first request
CHECK_TOKENS = 16  # some models refuse a lower limit
RETRIES = Retries(longest_seconds=30.0)
UNBOUNDED = 2**31 - 1
SEEDS = 2**31  # the range that every server accepts
_TOO_LONG = re.compile(r"context[ _-]?(length|size|window)|prompt is too long", re.IGNORECASE)
_LENGTHS = ("max_tokens", "max_completion_tokens")
SPENT = "spent.sqlite"
_OWN_KEYS = ("messages", "model", "n", "stream", "tools")


# --- replies ----------------------------------------------------------------------------------------------------------


class _AssistantMessage(msgspec.Struct, frozen=True):
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _AssistantMessage
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None  # some servers return errors here, with status 200


# --- the engine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OpenAIOptions:
    """The settings of a chat-completions API.

    Args:
        url: The URL before /chat/completions. It usually ends in /v1.
        api_key_env: The environment variable with the API key. Empty: OPENAI_API_KEY for api.openai.com, else no key.
        served_model: The server's name for the model. Empty: the value of --model.
        stop: Texts that end a reply.
        body: More keys for each request, such as top_p or reasoning_effort.
        leave_out: Keys that are not sent, because the server refuses them, such as seed or temperature.
        connections: Requests in flight at the same time. The others wait.
        request_seconds: How long one reply may take, including retries.
        attempts: How many times a request is sent if it fails with a temporary error.
        prices: Dollars for a million input tokens and a million output tokens, by model.
        dollars_max: The most dollars that the run may spend.
        tokens_max: The most tokens that the run may spend, input and output together.
        cache: A SQLite file for replies, which processes and runs may share. Empty: replies are not kept.

    Raises ConfigError for invalid settings.
    """

    url: str = OPENAI_URL
    api_key_env: str = ""
    served_model: str = ""
    stop: tuple[str, ...] = ()
    body: dict[str, Any] | None = None
    leave_out: tuple[str, ...] = ()
    connections: int = 64
    request_seconds: float = 600.0
    attempts: int = 6
    prices: dict[str, tuple[float, float]] | None = None
    dollars_max: Annotated[float, Meta(ge=0)] | None = None
    tokens_max: Annotated[int, Meta(ge=0)] | None = None
    cache: str = ""

    @property
    def has_limit(self) -> bool:
        """Whether the run may only spend so much."""
        return self.dollars_max is not None or self.tokens_max is not None

    def __post_init__(self) -> None:
        for key in self.body or {}:
            if key in _OWN_KEYS:
                raise ConfigError(f"--inference.body.{key}: the run sets this key; leave it out")
        if self.has_limit and set(_LENGTHS) & set(self.leave_out):
            raise ConfigError(
                "--inference.leave-out: without a limit for the tokens of a reply, its price has no limit either; "
                "leave out either this, or --inference.dollars-max and --inference.tokens-max"
            )
        check_bounds(
            ("--inference.connections", self.connections, self.connections >= 1, "1 or more"),
            ("--inference.attempts", self.attempts, self.attempts >= 1, "1 or more"),
            ("--inference.request-seconds", self.request_seconds, self.request_seconds > 0, "a number above 0"),
        )


class OpenAIInference:
    """Implements InferenceBackend, CanChat and CanMeter for one chat-completions API. `key_name` is the environment
    variable of the key, for messages ("": no key). What is spent is counted in a file of `folder` ("": in memory), if
    there are prices, limits or a cache.
    """

    capabilities = Capabilities(trainable=False, checks=True, chats=True, meters=True)
    context_tokens_max = UNBOUNDED  # the server checks the length
    vocabulary_size = version = 0

    def __init__(
        self,
        model: str,
        options: OpenAIOptions,
        *,
        api_key: str = "",
        key_name: str = "",
        seed: int = 0,
        folder: str = "",
    ) -> None:
        self.model, self._options, self._api_key, self._key_name = model, options, api_key, key_name
        self._client = ProxyClient(
            _url_of(options),
            api_key=api_key,
            connections_max=options.connections,
            retries=RETRIES._replace(attempts_max=options.attempts),
            seed=seed,
        )
        self.url = self._client.url
        self._limit_name = "max_tokens"
        self._numbers = itertools.count()
        self._folder = folder
        self._meter: Meter | None = None  # opened by the first request: a dry run writes nothing
        self._cache: SpendingStore | None = None
        self._spending: Spending | None = None

    def __repr__(self) -> str:
        return f"{self.model} at {self.url}"

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._client.aclose()
        self._spending = self.spending()
        if self._meter is not None:
            self._meter.store.close()
            self._meter = None
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    # --- what it costs ------------------------------------------------------------------------------------------------

    def spending(self) -> Spending | None:
        """What was spent so far, also in earlier processes of the run; None without prices, limits and a cache."""
        return self._spending if self._meter is None else self._meter.spending()

    def _open_files(self) -> None:
        """Open the file of the spending, and that of the replies. Raises RunError."""
        options = self._options
        if self._cache is None and options.cache:
            self._cache = SpendingStore(options.cache)
        if self._meter is None and (options.prices or options.has_limit or options.cache):
            store = SpendingStore(str(Path(self._folder) / SPENT) if self._folder else "")
            self._meter = Meter(store, self.model, options)

    # --- chat ---------------------------------------------------------------------------------------------------------

    async def chat(self, request: ChatRequest) -> ChatReply:
        """The reply to a conversation, from the cache or from the API.

        Raises InferenceError if there is no usable reply after all attempts (`is_transient` is False if a retry cannot
        help), or if the first turn exceeds the model's context; BudgetSpentError before a request that could exceed a
        limit; and RunError if the cache cannot be read or written.
        """
        self._open_files()
        key = self._key_of(request) if self._cache is not None else ""
        if (known := await self._kept(key)) is not None:
            return known
        try:
            completion = await self._post(self._client, request, self._options.request_seconds)
        except HTTPFailure as failure:
            has_spoken = any(message.role == "assistant" for message in request.messages)
            if failure.status == 400 and has_spoken and _TOO_LONG.search(str(failure)):
                return ChatReply(Message("assistant"), "context", detail=str(failure))
            raise InferenceError(str(failure), is_transient=failure.retryable) from failure
        reply = self._read(completion, request.tools)
        if self._cache is not None:
            await trio.to_thread.run_sync(self._cache.keep, key, msgspec.json.encode(reply).decode())
        return reply

    async def _kept(self, key: str) -> ChatReply | None:
        """The reply of an earlier request; None if there is none."""
        if self._cache is None or self._meter is None:
            return None
        found = await trio.to_thread.run_sync(self._cache.reply, key)
        if found is None:
            return None
        self._meter.store.count(cache_hits=1)
        return msgspec.json.decode(found, type=ChatReply)

    def _key_of(self, request: ChatRequest) -> str:
        """What identifies a request: all that is sent, and its seed, which depends on the task, the sample and the
        turn. The API key is not part of it.
        """
        identity = [self.url, request.seed, self._body(request)]
        return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()

    async def check(self, tools: Sequence[dict[str, Any]] = (), temperature: float = 1.0) -> None:
        """Request a few tokens, as the run does. Raises ConfigError, with advice on what to type, if the request
        fails, and BudgetSpentError if nothing may be requested.
        """
        self._open_files()
        request = ChatRequest([Message("user", "Say hello.")], list(tools), CHECK_TOKENS, 0, temperature)
        async with ProxyClient(self.url, api_key=self._api_key, connections_max=1) as client:
            try:
                try:
                    completion = await self._post(client, request, CHECK_SECONDS)
                except HTTPFailure as failure:
                    if failure.status != 400 or "max_completion_tokens" not in str(failure):
                        raise
                    self._limit_name = "max_completion_tokens"  # the key of OpenAI's newer models
                    completion = await self._post(client, request, CHECK_SECONDS)
                self._read(completion, request.tools)
            except HTTPFailure as failure:
                raise ConfigError(self._refusal(failure)) from failure
            except InferenceError as error:
                raise ConfigError(f"{self!r} cannot be used: {error}") from error

    async def _post(self, client: ProxyClient, request: ChatRequest, seconds: float) -> _Completion:
        """The completion of a request, within the limits. Raises HTTPFailure, BudgetSpentError."""
        body = self._body(request)
        if self._meter is None:
            return await client.post(COMPLETIONS, body, _Completion, timeout_seconds=seconds)
        longest = max((int(body[name]) for name in _LENGTHS if name in body), default=0)
        metered = self._meter.request(msgspec.json.encode(body), longest)
        await metered.reserve()  # before the deadline of the request begins
        try:
            completion = await client.post(
                COMPLETIONS, body, _Completion, timeout_seconds=seconds, each_attempt=metered
            )
        except BaseException:  # also a cancellation, for example before the first attempt
            metered.give_back()
            raise
        usage = completion.usage or _Usage()
        metered.settle(usage.prompt_tokens, usage.completion_tokens)
        return completion

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        """The body of a request."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [_message_body(message) for message in request.messages],
            self._limit_name: request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed % SEEDS,
        }
        if request.tools:
            body["tools"] = request.tools
        if self._options.stop:
            body["stop"] = self._options.stop
        body |= self._options.body or {}
        return {key: value for key, value in body.items() if key not in self._options.leave_out}

    def _read(self, completion: _Completion, tools: Sequence[Mapping[str, Any]]) -> ChatReply:
        """The single choice as a message. Raises InferenceError."""
        choices = completion.choices or []
        if len(choices) != 1:
            said = f": {error_message({'error': completion.error})}" if completion.error else ""
            raise InferenceError(f"{self.url} returned a reply with {len(choices)} choices, expected 1{said}")
        choice = choices[0]
        if choice.finish_reason == "error":
            raise InferenceError(f"{self.url} ended its reply with an error")
        answer, usage = choice.message, completion.usage or _Usage()
        calls = typed([read_call(raw) for raw in answer.tool_calls or ()], tools)
        # A tool message must name the id of its call.
        calls = [msgspec.structs.replace(call, id=call.id or f"call_{place}") for place, call in enumerate(calls)]
        reasoning = answer.reasoning_content or answer.reasoning or None
        try:  # some servers return parts
            given = read_message({"role": "assistant", "content": answer.content or answer.refusal or ""})
        except BadRowError as error:
            raise InferenceError(f"{self.url} returned a reply that cannot be read: {error}") from error
        message = Message("assistant", given.content, calls or given.tool_calls, reasoning=reasoning or given.reasoning)
        is_cut = choice.finish_reason == "length"
        return ChatReply(message, "length" if is_cut else "stop", usage.prompt_tokens, usage.completion_tokens)

    def _refusal(self, failure: HTTPFailure) -> str:
        """Why the first request failed, and what to do about it."""
        status, words = failure.status, ""
        if status in (401, 403):
            words = "put an API key into an environment variable, and type --inference.api-key-env ITS_NAME"
            if self._key_name:
                words = f"the API key in the variable {self._key_name} is refused; is it correct?"
        elif status == 404:
            words = (
                f"check that the server has the model {self.model!r} (if not, type --model or --inference.served-model)"
                ", and that the URL is the part before /chat/completions; it usually ends in /v1"
            )
        elif status == 400 and "tool" in str(failure):
            words = (
                "the environment has tools, but this server refuses them; vLLM needs --enable-auto-tool-choice "
                "--tool-call-parser hermes (or the model's own), SGLang --tool-call-parser"
            )
        elif status == 400:
            words = "--inference.leave-out '[\"seed\"]' leaves out keys, and --inference.body.KEY VALUE adds keys"
        elif failure.kind == "garbage":
            words = "this server has no chat-completions API; check --inference.url"
        elif failure.kind in ("refused", "reset", "timeout"):
            words = "check that the server runs, and that --inference.url is its URL"
        return f"{self!r} cannot be used: {failure}" + (f"\n{words}" if words else "")

    # --- the rest of InferenceBackend ---------------------------------------------------------------------------------

    def open_session(self, order: tuple[int, ...]) -> str:
        """A name for the episode, which is not sent to the server."""
        return f"{'-'.join(map(str, order))}-{next(self._numbers)}"

    def close_session(self, session: str) -> None:
        """Does nothing: sessions have no state here."""

    async def _refuse(self, *given: Any, **named: Any) -> NoReturn:
        """Always raises InferenceError: there are no token ids, and the server's weights are fixed."""
        raise InferenceError(
            f"{self!r} is a chat API: it takes messages and returns no token ids with logprobs", is_transient=False
        )

    generate = score = update_weights = _refuse

    async def health(self) -> Health:
        """Whether a request for a few tokens succeeds."""
        try:
            await self.check()
        except ConfigError as error:
            return Health(False, 0, str(error))
        return Health(True, 0)


# --- what it costs --------------------------------------------------------------------------------------------------
# Requests are counted before they are sent, so that tokens and dollars never exceed the limits. A request reserves the
# most that it can cost. If that does not fit, it waits for the open ones, which usually cost less than they reserved.
# Only if none is open, the budget is spent.


class Meter:
    """Counts the requests of one model in `store`, within the limits of `options`."""

    def __init__(self, store: SpendingStore, model: str, options: OpenAIOptions) -> None:
        self.store, self._model, self._prices = store, model, options.prices
        self._limits = options.tokens_max, options.dollars_max
        self._open = 0
        self._turn, self._changed = trio.StrictFIFOLock(), trio.Event()

    def request(self, body: bytes, max_tokens: int) -> MeteredRequest:
        """A request with this body, whose reply has at most `max_tokens` tokens."""
        most = input_tokens_at_most(body)
        return MeteredRequest(self, most + max_tokens, price(self._prices, self._model, most, max_tokens))

    async def reserve(self, tokens: int, dollars: float) -> None:
        """Count the most that a request can cost. Raises BudgetSpentError if the limits do not allow it."""
        async with self._turn:  # in the order of their arrival, so that a long request is not passed by short ones
            while not self.store.reserve(tokens, dollars, *self._limits):
                if not self._open:
                    raise self._spent(tokens, dollars)
                self._changed = trio.Event()
                await self._changed.wait()
            self._open += 1

    def close_request(self, tokens: int, dollars: float) -> None:
        """Add the difference between what a request cost and what it reserved: it is not open any more."""
        self.store.settle(tokens, dollars)
        self._open -= 1
        self._changed.set()

    def settle(self, reserved: MeteredRequest, input_tokens: int | None, output_tokens: int | None) -> None:
        """Count the price of a reply in place of what was reserved. Without its tokens, it counts as the most."""
        if input_tokens is None or output_tokens is None or min(input_tokens, output_tokens) < 0:
            self.store.count(requests=1)
            self.close_request(0, 0.0)
            return
        self.store.count(requests=1, prompt_tokens=input_tokens, completion_tokens=output_tokens)
        dollars = price(self._prices, self._model, input_tokens, output_tokens)
        self.close_request(input_tokens + output_tokens - reserved.tokens, dollars - reserved.dollars)

    def spending(self) -> Spending:
        """What was spent so far."""
        (tokens, dollars), counts = self.store.spent(), self.store.counts()
        own = {name: counts.get(name, 0) for name in ("requests", "cache_hits", "prompt_tokens", "completion_tokens")}
        known = dollars if self._model in (self._prices or {}) else None
        return Spending(**own, tokens_spent=tokens, dollars=known)

    def _spent(self, tokens: int, dollars: float) -> BudgetSpentError:
        """The error for a request that may cost this much, with the flags of higher limits."""
        spent, (tokens_max, dollars_max) = self.store.spent(), self._limits
        needs, flags = [], []
        if tokens_max is not None and spent[0] + tokens > tokens_max:
            needs.append(f"{tokens} tokens")
            flags.append(f"--inference.tokens-max {2 * (spent[0] + tokens)}")
        if dollars_max is not None and spent[1] + dollars > dollars_max:
            needs.append(f"${dollars:.4f}")
            flags.append(f"--inference.dollars-max {2 * (spent[1] + dollars):.2g}")
        return BudgetSpentError(
            f"the budget of {self._model} is spent: {spent_words(*spent, *self._limits)}, and the next request may "
            f"need {' and '.join(needs)} more",
            flags=" ".join(flags),
        )


class MeteredRequest:
    """One request, and the most `tokens` and `dollars` that an attempt can cost. Enter it for each attempt."""

    def __init__(self, meter: Meter, tokens: int, dollars: float) -> None:
        self.tokens, self.dollars, self._meter, self._is_open = tokens, dollars, meter, False

    async def reserve(self) -> None:
        """Reserve what the next attempt can cost, unless it is reserved. Raises BudgetSpentError."""
        if not self._is_open:
            await self._meter.reserve(self.tokens, self.dollars)
            self._is_open = True

    async def __aenter__(self) -> Self:
        await self.reserve()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """A failed attempt that the API may have billed counts as the most that it can have cost."""
        if error is not None and not _is_free(error):
            self._close(0, 0.0)

    def settle(self, input_tokens: int | None, output_tokens: int | None) -> None:
        """Count the tokens of the reply in place of what was reserved; None: the API did not report them."""
        assert self._is_open, "a reply comes from an attempt"
        self._is_open = False
        self._meter.settle(self, input_tokens, output_tokens)

    def give_back(self) -> None:
        """Take back what is reserved, after attempts that were free."""
        if self._is_open:
            self._close(-self.tokens, -self.dollars)

    def _close(self, tokens: int, dollars: float) -> None:
        self._is_open = False
        self._meter.close_request(tokens, dollars)


def _is_free(error: BaseException) -> bool:
    """Whether an attempt cost nothing: there was no connection, or the API answered with an error status."""
    return isinstance(error, HTTPFailure) and (error.kind == "refused" or error.status is not None)


# --- composing --------------------------------------------------------------------------------------------------------


def _check(values: Mapping[str, Any]) -> None:
    """Run the factory's checks, which open no connection. Raises ConfigError."""
    names = inspect.signature(create_openai_inference).parameters
    create_openai_inference(**{name: values[name] for name in names})


def _url_of(options: OpenAIOptions) -> str:
    """The URL before /chat/completions."""
    return options.url.rstrip("/").removesuffix(COMPLETIONS)


def _key_of(name: str, url: str) -> tuple[str, str]:
    """The API key and its environment variable. Raises ConfigError if a required key is missing.

    OPENAI_API_KEY is sent to OpenAI only, unless you name that variable.
    """
    is_openai = read_url(url)[1] == read_url(OPENAI_URL)[1]
    name = name or ("OPENAI_API_KEY" if is_openai else "")
    key = os.environ.get(name, "").strip() if name else ""
    if name and not key:
        raise ConfigError(
            f"the environment variable {name} is empty, but {url} needs an API key; type: export {name}=... "
            "(or name another variable with --inference.api-key-env, or another server with --inference.url)"
        )
    return key, name


@checked_by(_check)
@evaluation_only
def create_openai_inference(
    model: str, training: Any, seed: int, folder: str, *, options: OpenAIOptions = OpenAIOptions()
) -> OpenAIInference:
    """Any chat-completions API, for evaluation only. Raises ConfigError."""
    if not options.served_model and (not model or model in BUNDLED):
        raise ConfigError(
            "--inference openai: give the server's name for the model, such as --model gpt-4.1-mini; if the server's "
            f"model is really called {model or 'model'!r}, type --inference.served-model {model or 'NAME'}"
        )
    if training is not None:
        raise ConfigError(
            "--inference openai: a chat API returns no token ids with logprobs, so you cannot train on its replies; "
            "type --inference hf to train, or `rollouts eval` to evaluate"
        )
    key, name = _key_of(options.api_key_env, _url_of(options))
    served = options.served_model or model
    check_prices("--inference", [served], options.prices, options.dollars_max)
    if options.cache:
        check_file("--inference.cache", options.cache)
    return OpenAIInference(served, options, api_key=key, key_name=name, seed=seed, folder=folder)


def _message_body(message: Message) -> dict[str, Any]:
    """A message in the API's format. A malformed call is sent without arguments."""
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["content"] = message.content or None
        functions = [
            {"name": c.name, "arguments": msgspec.json.encode(c.arguments).decode()} for c in message.tool_calls
        ]
        calls = zip(message.tool_calls, functions, strict=True)
        body["tool_calls"] = [{"id": call.id, "type": "function", "function": each} for call, each in calls]
    if message.role == "tool":
        body["tool_call_id"] = message.tool_call_id or ""
    elif message.name:
        body["name"] = message.name
    return body
