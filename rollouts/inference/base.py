"""What the agent loop asks of an inference engine: token ids in, token ids and logprobs out.

The caller need not know whether the engine is in this process or behind HTTP, nor how it batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol, cast

import msgspec

from rollouts.errors import ConfigError


class GenerateRequest(msgspec.Struct, frozen=True):
    """One turn to sample.

    `tokens` is the whole context [L]. `order` is (group, rollout, turn): engines that batch in process form their
    batches in this order. `session` names the episode, so that a turn continues the cache of the turn before.
    `temperature` 0 is greedy (its logprobs are those of temperature 1). Sampling stops after an id of `stop_ids`
    (kept in the output) or after `max_tokens` ids. `seed` alone decides the random numbers of this request.

    `offset` is above 0 where a reply goes on that was aborted: so many tokens of it were sampled already (they are the
    last ones of `tokens`), and so many of the seed's random numbers are spent.
    """

    tokens: list[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    temperature: float = 1.0
    order: tuple[int, ...] = ()
    session: str | None = None
    offset: int = 0


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a generation were sampled by policy `version`."""

    version: int
    start: int
    end: int


class Generation(msgspec.Struct, frozen=True):
    """What was sampled: `tokens` [K], `logprobs` [K] (at the sampling temperature, natural log), why it ended, by
    which weights.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    spans: list[VersionSpan]

    @property
    def versions(self) -> list[int]:
        """The policy version of each token [K]."""
        return [span.version for span in self.spans for _ in range(span.start, span.end)]


class Health(msgspec.Struct, frozen=True):
    """Whether the engine can serve, at which policy version, and why not if it cannot."""

    ok: bool
    version: int
    detail: str = ""


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of an update, so that both ends can say whether it arrived: `crc32` is of its bytes, in C order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    crc32: int


class Probe(msgspec.Struct, frozen=True):
    """One fixed sequence [L] and what the trainer's weights of this version give it: logprobs [L] (the first is 0.0) at
    temperature 1. An engine that serves those weights gives the same, `tolerance` nats a token apart at most.
    """

    tokens: list[int]
    logprobs: list[float]
    tolerance: float


class WeightUpdate(msgspec.Struct, frozen=True):
    """New weights for an engine: the policy version they are, their kind, and where they are: in the folder `path` (as
    transformers or peft load them), or CPU tensors by name (`weights`). Neither: the engine shares the trainer's
    parameters.

    `manifest` says what the tensors are, and `probe` how to see that they are served; an engine that has lost its
    weights and takes them up again by itself asks it.
    """

    version: int
    kind: Literal["full", "adapter"] = "full"
    path: str | None = None
    weights: Mapping[str, Any] | None = None
    manifest: tuple[TensorInfo, ...] = ()
    probe: Probe | None = None


class Capabilities(NamedTuple):
    """What an engine is and can do. The defaults describe an engine with fixed weights, behind a wire.

    `trainable`: it returns token ids with logprobs. False: it is good for evaluation only.
    `in_process`: it computes as the trainer does, in its process, so its logprobs are the trainer's.
    `owns_weights`: it has weights of its own, and every update must bring the new ones.

    The rest of the facts matter where it owns weights. `weights_kind`: an update brings all weights, or those of a LoRA
    adapter. `weights_as`: it brings them as tensors, as a folder in `weights_folder`, or over torch.distributed, full
    ones only (`servers.dialect`). `tolerance`: how far its logprob of a token may be from the trainer's, in nats; 0:
    this goes by the type of the weights. `load_seconds`: how long it may take to load them. `scores_alone`: all else
    waits while it scores, so it is asked for scores only when weights change.

    What it can do besides, each by a method that it has then: `aborts` (`CanAbort`), `checks` (`CanCheck`), `chats`
    (`CanChat`), `is_pool` (`EnginePool`).
    """

    trainable: bool = True
    in_process: bool = False
    owns_weights: bool = False
    weights_kind: Literal["full", "adapter"] = "full"
    weights_as: Literal["tensors", "folder", "group"] = "tensors"
    weights_folder: str = ""
    tolerance: float = 0.0
    load_seconds: float = 600.0
    scores_alone: bool = False
    aborts: bool = False
    checks: bool = False
    chats: bool = False
    is_pool: bool = False


class InferenceBackend(Protocol):
    """An engine. It is an async context manager: entering makes it ready, leaving frees what it holds.

    Every field is required, and known when the engine is made; `context_tokens_max` and `version` may change later.
    """

    capabilities: Capabilities
    context_tokens_max: int  # prompt and reply together must fit
    vocabulary_size: int  # ids that it takes are below; 0: it does not say
    version: int  # the policy version that it serves; 0 before the first update

    async def __aenter__(self) -> InferenceBackend: ...

    async def __aexit__(self, *exc: Any) -> None: ...

    def open_session(self, order: tuple[int, ...]) -> str:
        """Announce an episode before its task runs. An in-process engine forms a batch once every open session waits
        in `generate`.
        """

    def close_session(self, session: str) -> None:
        """The episode is over; its cache may go. Closing twice is harmless."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Raises InferenceError."""

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each token [L] given those before it; the first is 0.0. Raises InferenceError."""

    async def update_weights(self, update: WeightUpdate) -> None:
        """Serve other weights; they are served only after this returns."""

    async def health(self) -> Health:
        """Whether it can serve, and at which version."""


class CanAbort(InferenceBackend, Protocol):
    """An engine that gives unfinished replies back. One that cannot is left to finish them."""

    async def abort(self, session: str) -> None:
        """Give back what the session waits for: its `generate` returns what there is, with the finish `abort`.

        Nothing of it is sampled any more soon after; a request that has not begun comes back with no tokens. Harmless
        where the session waits for nothing. The session stays open.
        """


class CanCheck(InferenceBackend, Protocol):
    """An engine that can be refused before a run has a folder: a server that is not there, or is another one."""

    async def check(self) -> None:
        """Raise UserError where it cannot be used as it is set up. Nothing stays open, nothing is started."""


class EnginePool(InferenceBackend, Protocol):
    """An engine that is several: weights are sent to each of its `members`, and each is probed."""

    @property
    def members(self) -> tuple[InferenceBackend, ...]:
        """Those that serve now."""


def members_of(engine: InferenceBackend) -> tuple[InferenceBackend, ...]:
    """The engines that an engine is: its members, or itself."""
    return cast(EnginePool, engine).members if engine.capabilities.is_pool else (engine,)


METHOD_OF = {"aborts": "abort", "checks": "check", "chats": "chat", "is_pool": "members"}


def check_engine(engine: Any, name: str) -> InferenceBackend:
    """The same engine, seen to have all that `InferenceBackend` requires, and what its capabilities say. Raises
    ConfigError, which names the component and what is missing.
    """
    required = [key for key, value in vars(InferenceBackend).items() if inspect.iscoroutinefunction(value)]
    required = [*InferenceBackend.__annotations__, "open_session", "close_session", *required]
    missing = [key for key in required if not hasattr(engine, key)]
    own = f"--inference {name}: {type(engine).__name__}"
    if "capabilities" not in missing:
        if not isinstance(engine.capabilities, Capabilities):
            given = type(engine.capabilities).__name__
            raise ConfigError(f"{own}.capabilities is {given}, expected a rollouts.inference.base.Capabilities")
        for capability, method in METHOD_OF.items():
            is_claimed = getattr(engine.capabilities, capability)
            if is_claimed and not hasattr(engine, method):
                missing.append(f"{method} (it says {capability})")
            if hasattr(engine, method) and not is_claimed:
                raise ConfigError(
                    f"{own} has {method}, and its capabilities do not say so: give it capabilities = "
                    f"Capabilities({capability}=True), or {method} another name"
                )
    if missing:
        raise ConfigError(
            f"{own} has no {', no '.join(missing)}: an engine has every field and method of "
            "rollouts.inference.base.InferenceBackend, such as `capabilities = Capabilities()`; see docs/inference.md"
        )
    return cast(InferenceBackend, engine)
