"""Dialect: what one kind of model server is asked and answers, and the shapes in which `Server` speaks of it.

`vllm` and `sglang` implement it. Left out: everything that servers have in common (`server`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from rollouts.inference.base import GenerateRequest, WeightUpdate
from rollouts.inference.servers.http import HTTPClient, HTTPFailure, PlainClient

FINISHES: dict[str, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}


class ServerInfo(NamedTuple):
    """What a server says of itself. `logprobs`: of the distribution that was sampled from (`processed`: at the
    sampling temperature), or at temperature 1 whatever was sampled (`raw`). `models` are the names it answers to.
    `loads_adapters` and `loads_weights`: whether it was started so that it can; `lora_rank_max` where it says (0: it
    does not).
    """

    software: str  # "vLLM 0.32.0"
    models: tuple[str, ...]
    context_tokens_max: int
    logprobs: Literal["processed", "raw"] = "processed"
    loads_adapters: bool = False
    lora_rank_max: int = 0
    loads_weights: bool = True


class Sampled(NamedTuple):
    """One answer: ids [K], their logprobs [K], and why it ended.

    `spans` (name, start, end): tokens [start, end) are of the weights that were loaded under this name, which is
    `str(update.version)`; another name: those that were served when the request was sent. Empty: so were all.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    spans: tuple[tuple[str, int, int], ...] = ()


class RequestTarget(NamedTuple):
    """How a request is addressed: its own `name` (two never have the same), the `model` or adapter that is to answer
    (empty: the server's base model), and what sets caches of other weights apart.
    """

    name: str
    model: str = ""
    salt: str = ""


class Dialect(Protocol):
    """What one kind of server speaks. Stateless: each method asks the server through `client`, and raises HTTPFailure
    where that fails.
    """

    software: str  # "vLLM", for messages
    keeps_requests: bool  # weights may be loaded while requests are under way, which stay valid (`Sampled.spans`)
    scores_adapters_alone: bool  # to score with an adapter beside other requests harms it
    # Flags that a server is started with so that it can, for messages; {rank} is the adapters' rank.
    adapter_flags: str
    weights_flags: str
    logprobs_flags: str  # so that its logprobs are of the sampling temperature

    async def handshake(self, client: PlainClient) -> ServerInfo:
        """Who is there, after it has generated something. Raises ConfigError: it is something else, too old, or was
        started without a flag that is needed; the message prints the flag. HTTPFailure with status 401 or 403: the API
        key is missing or refused.
        """

    async def generate(self, client: HTTPClient, request: GenerateRequest, target: RequestTarget) -> Sampled:
        """Sample one turn. An aborted request comes back with what it has. Raises InferenceError."""

    async def score(self, client: HTTPClient, tokens: list[int], target: RequestTarget) -> list[float]:
        """Logprob of each token [L] at temperature 1, the first 0.0. Raises InferenceError."""

    async def abort(self, client: PlainClient, names: Sequence[str]) -> None:
        """Give back what these requests have. Harmless for one that is over or was never there."""

    async def load_full(self, client: PlainClient, update: WeightUpdate) -> None:
        """Serve the weights in `update.path` from now on, with no cache of the old ones. No request is under way unless
        `keeps_requests`; then those go on with the new weights, as if these had read all that was said before.

        Raises InferenceError; `is_transient` False where the server has to be started again.
        """

    async def load_adapter(self, client: PlainClient, update: WeightUpdate, *, old: str) -> str:
        """Load the adapter in `update.path`, and forget the one called `old` (empty: there is none), which no request
        under way carries. Gives the name that requests are to carry; with `keeps_requests` a new one each time, since
        others are under way with the adapter before this one. Raises as `load_full`.
        """

    async def unload_adapter(self, client: PlainClient, name: str) -> None:
        """Forget this adapter; harmless where there is none of that name. Raises InferenceError."""

    async def tokenize(self, client: PlainClient, text: str) -> list[int] | None:
        """The server's own ids of a text; None where it does not say."""


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


async def ids_of_text(client: PlainClient, text: str, *, without_tokenizer: Sequence[int]) -> list[int] | None:
    """The ids of a text at POST /tokenize, none added; None for the statuses of a server that has no tokenizer."""
    body = {"prompt": text, "add_special_tokens": False}
    try:
        return (await client.post("/tokenize", body, _Tokens)).tokens
    except HTTPFailure as failure:
        if failure.status in without_tokenizer:
            return None
        raise


# --- weights over torch.distributed -----------------------------------------------------------------------------------


class GroupPlace(NamedTuple):
    """Where the trainer (rank 0) and the workers of servers meet for one update: the store of rank 0 listens at
    `address` and `port`; `backend` is gloo or nccl.
    """

    address: str
    port: int
    world_size: int
    name: str
    backend: str


class GroupCalls(NamedTuple):
    """One kind of server's calls (`sglang_wire`): `ranks` (how many it takes), `join`, `receive` and `leave`."""

    ranks: Callable[..., Awaitable[int]]
    join: Callable[..., Awaitable[None]]
    receive: Callable[..., Awaitable[None]]
    leave: Callable[..., Awaitable[None]]


@runtime_checkable
class TakesGroup(Protocol):
    """An engine, or a server of a pool, that takes weights over a group: it has `weights_as = "group"`, and its updates
    bring a manifest of what is broadcast, in that order.
    """

    url: str

    async def group_ranks(self) -> int:
        """How many ranks it is."""

    async def join_group(self, place: GroupPlace, rank: int, receiving: Callable[[], None]) -> None:
        """Join as `rank` and those after it; returns once all ranks have. The next `update_weights` receives, and
        calls `receiving` when it is about to. Raises InferenceError.
        """

    async def leave_group(self) -> None:
        """Leave it; harmless where it is in none. Raises InferenceError."""
