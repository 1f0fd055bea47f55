"""Dialect: the interface to one kind of model server. `vllm` and `sglang` implement it; `server` uses it."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, cast, get_args, runtime_checkable

import msgspec

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, WeightUpdate
from rollouts_servers.http import HTTPClient, HTTPFailure

ADAPTER_PREFIX = "rollouts-v"
# Far from 1, so that one token usually shows the convention; the other tokens are for the remaining cases.
MEASURED_TEMPERATURE, MEASURED_TOKENS = 2.0, 16  # vLLM refuses temperatures above 2
NOISE_NATS = 0.05

Finish = Literal["stop", "length", "abort"]


class ServerInfo(NamedTuple):
    """What a server reports about itself.

    `logprobs` is `processed` (at the sampling temperature) or `raw` (always at temperature 1). `models` are the model
    names that it accepts. `loads_adapters` and `loads_weights` depend on its flags. `lora_rank_max` is 0 if unknown.
    """

    software: str  # "vLLM 0.32.0"
    models: tuple[str, ...]
    context_tokens_max: int
    logprobs: Literal["processed", "raw"] = "processed"
    loads_adapters: bool = False
    lora_rank_max: int = 0
    loads_weights: bool = True


class Sampled(NamedTuple):
    """One reply: ids [K], their logprobs [K], and why it ended.

    A span (name, start, end) says that the weights `name` sampled tokens [start, end). The name is
    `str(update.version)`; any other name means the weights that the server had when the request was sent. Without
    spans, these weights sampled all tokens.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: Finish
    spans: tuple[tuple[str, int, int], ...] = ()


class WeightSpan(msgspec.Struct, frozen=True, gc=False):
    """In the reply of a server: the weights `version` sampled tokens [start, end)."""

    version: str
    start: int = 0
    end: int = 0


def finish_of(reason: str, url: str) -> Finish:
    """Why a reply ended. Raises InferenceError for a reason that no server should give."""
    if reason not in get_args(Finish):
        raise InferenceError(f"{url} ended a reply with {reason!r}, expected {', '.join(get_args(Finish))}")
    return cast(Finish, reason)


class RequestTarget(NamedTuple):
    """Identifies a request at a server: a unique `name`, the `model` or adapter ("": the server's base model), and a
    `salt` that separates the caches of different weights.
    """

    name: str
    model: str = ""
    salt: str = ""


class Dialect(Protocol):
    """One kind of server. It is stateless: each method sends requests through `client`, and raises HTTPFailure if one
    fails. The methods with a body are the same for vLLM and SGLang.
    """

    software: str  # "vLLM", for messages
    keeps_requests: bool  # requests in flight stay valid while weights are loaded (`Sampled.spans`)
    scores_adapters_alone: bool  # scoring with an adapter beside other requests crashes the server
    adapter_path: str  # of the requests that load and unload adapters
    # The flags that enable a feature, for messages; {rank} is the adapters' rank.
    adapter_flags: str
    weights_flags: str
    logprobs_flags: str  # logprobs at the sampling temperature

    async def handshake(self, client: HTTPClient) -> ServerInfo:
        """Identify the server, and let it generate a token. Raises ConfigError if it is another kind of server, is too
        old, or was started without a required flag, which the message names. Raises HTTPFailure with status 401 or 403
        if the API key is missing or refused.
        """

    async def generate(self, client: HTTPClient, request: GenerateRequest, target: RequestTarget) -> Sampled:
        """Sample one turn. An aborted request returns its tokens so far. Raises InferenceError."""

    async def score(self, client: HTTPClient, tokens: list[int], target: RequestTarget) -> list[float]:
        """The logprob of each token [L] at temperature 1; the first is 0.0. Raises InferenceError."""

    async def abort(self, client: HTTPClient, names: Sequence[str]) -> None:
        """End these requests; each returns its tokens so far. Unknown and finished requests are ignored."""

    async def load_full(self, client: HTTPClient, update: WeightUpdate) -> None:
        """Serve the weights in `update.path` from now on, without caches of the old ones. If `keeps_requests` is False,
        no request is in flight. If it is True, requests in flight continue with the new weights, which compute their
        context anew.

        Raises InferenceError; `is_transient` is False if the server must be restarted.
        """

    async def logprobs_convention(self, client: HTTPClient) -> Literal["processed", "raw"]:
        """Measure the temperature of the server's logprobs: compare sampled logprobs with scores, which are at
        temperature 1. Raises ConfigError if the numbers are no logprobs, and HTTPFailure.
        """
        for first in range(MEASURED_TOKENS):
            request = GenerateRequest([first], 1, (), first, temperature=MEASURED_TEMPERATURE)
            name = f"rollouts-handshake-{secrets.token_hex(4)}"
            sampled = await self.generate(client, request, RequestTarget(f"{name}-sampled"))
            logprob, tokens = sampled.logprobs[0], [first, *sampled.tokens]
            raw = (await self.score(client, tokens, RequestTarget(f"{name}-scored")))[1]
            if max(logprob, raw) > NOISE_NATS:
                raise self.logits_error(client)
            if abs(logprob - raw) > NOISE_NATS * max(1.0, abs(raw)):
                return "processed"
        return "raw"

    def logits_error(self, client: HTTPClient) -> ConfigError:
        """The error for a server that returns logits."""
        what = f"{self.software} at {client.url} returns logits instead of logprobs"
        return ConfigError(f"{what}: start it with {self.logprobs_flags}")

    async def load_adapter(self, client: HTTPClient, update: WeightUpdate, *, old: str) -> str:
        """Load the adapter in `update.path`, and unload the adapter `old` ("": none), which no request in flight uses.

        Returns the adapter's name for requests. It is new each time, also among runs, because requests in flight use
        the previous adapter. The folder must exist while the name is in use. Raises like `load_full`.
        """
        name = f"{ADAPTER_PREFIX}{update.version}-{secrets.token_hex(4)}"
        if old:
            await self.unload_adapter(client, old)
        body = {"lora_name": name, "lora_path": absolute_folder(update)}
        try:
            await client.post(f"{self.adapter_path}/load_lora_adapter", body, bytes, attempts_max=1)
        except HTTPFailure as failure:
            raise InferenceError(
                f"{client.url} did not load the adapter of version {update.version} in {update.path}: {failure}; "
                "check its rank against --max-lora-rank, its layers against --lora-target-modules (SGLang), and that "
                "the server's machine can read that folder",
                is_transient=failure.retryable,
            ) from failure
        return name

    async def unload_adapter(self, client: HTTPClient, name: str) -> None:
        """Unload this adapter. Does nothing if no adapter has this name. Raises HTTPFailure."""
        try:
            await client.post(f"{self.adapter_path}/unload_lora_adapter", {"lora_name": name}, bytes)
        except HTTPFailure as failure:
            if failure.status not in (400, 404):  # it was evicted, or the server has restarted
                raise

    async def tokenize(self, client: HTTPClient, text: str) -> list[int] | None:
        """The server's ids of a text, without added tokens; None if it was started without a tokenizer."""
        body = {"prompt": text, "add_special_tokens": False}
        try:
            return (await client.post("/tokenize", body, _Tokens)).tokens
        except HTTPFailure as failure:
            if failure.status in (400, 404, 500, 501):
                return None
            raise


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


def absolute_folder(update: WeightUpdate) -> str:
    """The folder of an update as an absolute path, because the server has another working directory."""
    assert update.path is not None, update
    return str(Path(update.path).absolute())


# --- weights over torch.distributed -----------------------------------------------------------------------------------


class GroupPlace(NamedTuple):
    """The process group for one update: the trainer is rank 0, and the workers of servers are the other ranks. The
    store of rank 0 listens at `address` and `port`. `backend` is gloo or nccl.
    """

    address: str
    port: int
    world_size: int
    name: str
    backend: str


class GroupCalls(NamedTuple):
    """The process-group functions of one kind of server (`sglang`). `ranks` is its number of ranks."""

    ranks: Callable[..., Awaitable[int]]
    join: Callable[..., Awaitable[None]]
    receive: Callable[..., Awaitable[None]]
    leave: Callable[..., Awaitable[None]]


@runtime_checkable
class TakesGroup(Protocol):
    """An engine, or a server of a pool, that receives weights over a process group. Its capabilities have `weights_as =
    "group"`. The manifest of an update lists the tensors in the order of their broadcast.
    """

    url: str

    async def group_ranks(self) -> int:
        """The engine's number of ranks."""

    async def join_group(self, place: GroupPlace, rank: int, receiving: Callable[[], None]) -> None:
        """Join as `rank` and the ranks after it; returns when all ranks have joined. The next `update_weights` receives
        the weights, and calls `receiving` just before the transfer. Raises InferenceError.
        """

    async def leave_group(self) -> None:
        """Leave the group. Does nothing outside of a group. Raises InferenceError."""
