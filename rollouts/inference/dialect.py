"""Dialect: what one kind of model server is told and says, and the shapes in which it is told to `remote`.

Implemented by `vllm` and `sglang`. Left out: everything that servers have in common (`remote`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from rollouts.inference.base import GenerateRequest, WeightUpdate
from rollouts.inference.http.client import HTTPClient

__all__ = ["Dialect", "Sampled", "ServerInfo", "Work"]


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


class Work(NamedTuple):
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
    # Flags that a server is started with so that it can, for messages; {rank} stands for the adapters' rank.
    adapter_flags: str
    weights_flags: str
    logprobs_flags: str  # so that its logprobs are of the sampling temperature

    async def greet(self, client: HTTPClient) -> ServerInfo:
        """Who is there. Raises ConfigError: it is something else, too old, or was started without a flag that is
        needed; the message prints the flag. HTTPFailure with status 401 or 403: the API key is missing or refused.
        """
        ...

    async def generate(
        self, client: HTTPClient, request: GenerateRequest, work: Work, *, timeout_seconds: float
    ) -> Sampled:
        """Sample one turn. An aborted request comes back with what it has. Raises InferenceError."""
        ...

    async def score(
        self, client: HTTPClient, tokens: list[int], work: Work, *, temperature: float, timeout_seconds: float
    ) -> list[float]:
        """Logprob of each token [L], the first 0.0. Raises InferenceError."""
        ...

    async def abort(self, client: HTTPClient, names: Sequence[str]) -> None:
        """Give back what these requests have. Harmless for one that is over or was never there."""
        ...

    async def load_full(self, client: HTTPClient, update: WeightUpdate, *, timeout_seconds: float) -> None:
        """Serve the weights in `update.path` from now on, with no cache of the old ones. No request is under way unless
        `keeps_requests`; then those go on with the new weights, as if these had read all that was said before.

        Raises InferenceError; `is_transient` False where the server has to be started again.
        """
        ...

    async def load_adapter(self, client: HTTPClient, update: WeightUpdate, *, old: str, timeout_seconds: float) -> str:
        """Load the adapter in `update.path`, and forget the one called `old` (empty: there is none), which no request
        under way carries. Gives the name that requests are to carry; with `keeps_requests` a new one each time, since
        others are under way with the adapter before this one. Raises as `load_full`.
        """
        ...

    async def unload_adapter(self, client: HTTPClient, name: str, *, timeout_seconds: float) -> None:
        """Forget this adapter; harmless where there is none of that name. Raises InferenceError."""
        ...

    async def tokenize(self, client: HTTPClient, text: str) -> list[int] | None:
        """The server's own ids of a text; None where it does not say."""
        ...
