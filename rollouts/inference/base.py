"""The interface of an inference engine: token ids in, token ids and logprobs out.

The caller need not know whether the engine runs in this process or behind HTTP, nor how it forms batches.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import msgspec

from rollouts.errors import ConfigError, InferenceError

TOLERANCE_HALF = 5e-2  # for weights of 16 bits or fewer


class GenerateRequest(msgspec.Struct, frozen=True):
    """One turn to sample.

    `tokens` is the whole context [L]. `order` is (group, rollout, turn); an engine in this process sorts its batches by
    this. `session` names the episode, so that a turn can reuse the cache of the previous turn. `temperature` 0 is
    greedy (with logprobs of temperature 1). Sampling stops after an id of `stop_ids`, which the output includes, or
    after `max_tokens` ids. The random numbers of this request depend on `seed` alone.

    `role` is the role that replies, in an environment with roles. An engine with an adapter for each role uses that
    one; others ignore it.

    `offset` is above 0 if the request continues an aborted reply. If so, the last `offset` ids of `tokens` belong to
    that reply, and the first `offset` random numbers of the seed are used up.
    """

    tokens: list[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    temperature: float = 1.0
    order: tuple[int, ...] = ()
    session: str | None = None
    offset: int = 0
    role: str = ""


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a generation were sampled by policy `version`."""

    version: int
    start: int
    end: int


class Generation(msgspec.Struct, frozen=True):
    """A sampled reply: `tokens` [K] and `logprobs` [K] (natural logarithm, at the sampling temperature).

    `finish` says why the reply ended. `spans` says which version of the weights sampled which tokens.
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
    """Whether the engine can generate, its policy version, and the reason if it cannot."""

    ok: bool
    version: int
    detail: str = ""


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of an update. `crc32` is the checksum of its bytes in C order, so trainer and engine can compare
    them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    crc32: int


class Probe(msgspec.Struct, frozen=True):
    """A fixed sequence [L] with its logprobs [L] under the trainer's weights, at temperature 1 (the first is 0.0).

    An engine with the same weights must give the same logprobs, up to `tolerance` nats per token.
    """

    tokens: list[int]
    logprobs: list[float]
    tolerance: float


class Apart(NamedTuple):
    """The largest difference between two computations: the token's place, both numbers, and the allowed difference."""

    place: int
    ours: float
    theirs: float
    apart: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """Whether the difference is allowed. NaN is never allowed."""
        return self.apart <= self.allowed

    def words(self, what: str) -> str:
        """Describe it; `what` is the name of the sequence."""
        return (
            f"token {self.place} of {what} has the log-probability {self.theirs:.6g} there and {self.ours:.6g} in the "
            f"trainer, {self.apart:.2g} apart (at most {self.allowed:g})"
        )


def furthest_apart(ours: Sequence[float], theirs: Sequence[float], tolerance: float, *, first: int = 1) -> Apart:
    """The largest difference from place `first` on."""
    assert len(ours) == len(theirs) > first, f"{len(ours)=} {len(theirs)=} {first=}"
    # In 16 bits, the error of the logarithm of a small probability is proportional to its size.
    is_half = tolerance >= TOLERANCE_HALF
    scales = [max(1.0, abs(value)) if is_half else 1.0 for value in ours]
    apart = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    place = max(range(first, len(ours)), key=lambda index: (math.isnan(apart[index]), apart[index] / scales[index]))
    return Apart(place, ours[place], theirs[place], apart[place], tolerance * scales[place])


class WeightUpdate(msgspec.Struct, frozen=True):
    """New weights for an engine, with their policy version and kind.

    The weights are in the folder `path` (in the format of transformers or peft), or in `weights` (CPU tensors by name).
    `path` and `weights` are None if the engine shares the trainer's parameters. `manifest` lists the tensors. `probe`
    tests whether the engine serves these weights; an engine that restarts uses it to test the weights that it reloads.
    """

    version: int
    kind: Literal["full", "adapter"] = "full"
    path: str | None = None
    weights: Mapping[str, Any] | None = None
    manifest: tuple[TensorInfo, ...] = ()
    probe: Probe | None = None


class Capabilities(NamedTuple):
    """What an engine is and can do. The defaults describe a remote engine with fixed weights.

    `trainable`: it returns token ids with logprobs. If False, use it for evaluation only.
    `in_process`: it runs in the trainer's process, and its logprobs equal the trainer's.
    `owns_weights`: it has its own weights, so every update must bring the new ones.

    The next five fields matter only if the engine owns its weights:
    `weights_kind`: "full" if an update brings all weights, "adapter" if it brings the weights of a LoRA adapter.
    `weights_as`: an update brings tensors, or a folder inside `weights_folder`, or it broadcasts full weights over
    torch.distributed (`rollouts_servers.broadcast`).
    `tolerance`: the largest difference to the trainer's logprob of a token, in nats. 0: a number that depends on the
    dtype.
    `load_seconds`: the deadline for loading weights.
    `scores_alone`: other requests wait while the engine scores, so it scores only when weights change.

    Each of these flags promises the methods of a Protocol: `aborts` (`CanAbort`), `checks` (`CanCheck`), `chats`
    (`CanChat`), `is_pool` (`EnginePool`), `waits_for_sessions` (`WaitsForSessions`), `meters` (`CanMeter`) and
    `has_states` (`HasStates`).
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
    waits_for_sessions: bool = False
    meters: bool = False
    has_states: bool = False


class Spending(NamedTuple):
    """What an API has cost so far, also in earlier processes. Tokens are those that the API reported; `tokens_spent`
    and `dollars` also count requests whose price is unknown, as the most that they can have cost. `dollars` is None
    without a price.
    """

    requests: int
    cache_hits: int
    prompt_tokens: int
    completion_tokens: int
    tokens_spent: int
    dollars: float | None


class EngineState(NamedTuple):
    """An engine now: the version of its weights, and its requests or episodes in flight. `state` says what it does if
    it does not serve.
    """

    name: str
    version: int
    in_flight: int
    state: str = ""


class InferenceBackend(Protocol):
    """An engine. It is an async context manager: entering starts it, and leaving frees its resources.

    Every field is required and set at construction. `context_tokens_max` and `version` may change later.
    """

    capabilities: Capabilities
    context_tokens_max: int  # the limit for prompt and reply together
    vocabulary_size: int  # the engine accepts ids below this; 0: unknown
    version: int  # the served policy version; 0 before the first update

    async def __aenter__(self) -> InferenceBackend: ...

    async def __aexit__(self, *exc: Any) -> None: ...

    def open_session(self, order: tuple[int, ...]) -> str:
        """Announce an episode before its task starts. An engine in this process forms a batch when every open session
        waits in `generate`.
        """

    def close_session(self, session: str) -> None:
        """End the session, because its episode is over. Its cache may be freed. It is safe to close a session twice."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Raises InferenceError."""

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """The logprob of each token [L] given the tokens before it; the first is 0.0. Raises InferenceError."""

    async def update_weights(self, update: WeightUpdate) -> None:
        """Serve new weights; returns when they are served. Raises InferenceError."""

    async def health(self) -> Health:
        """Whether the engine can generate, and its policy version."""


class CanAbort(InferenceBackend, Protocol):
    """An engine that can return an unfinished reply. With other engines, callers wait for whole replies."""

    async def abort(self, session: str) -> None:
        """End the session's request. Its `generate` returns the tokens so far, with the finish `abort`.

        A request that has not started returns no tokens. Sampling stops soon after. The session stays open. Does
        nothing if the session has no request.
        """


class WaitsForSessions(InferenceBackend, Protocol):
    """An engine that forms a batch when every open session waits."""

    def release_session(self, session: str) -> None:
        """From now on, no batch waits for this session. Its requests still join the next batch. Does nothing if the
        session is closed.
        """


class CanCheck(InferenceBackend, Protocol):
    """An engine that can be checked before the run creates its folder, such as a server that may be unreachable."""

    async def check(self) -> None:
        """Raise UserError if the engine cannot be used with its settings. Starts nothing and leaves nothing open."""


class CanMeter(InferenceBackend, Protocol):
    """An engine that counts what its requests cost."""

    def spending(self) -> Spending | None:
        """What was spent so far, also after the engine was left; None if nothing has to be counted."""


class EnginePool(InferenceBackend, Protocol):
    """Several engines behind one interface. New weights are sent to each of the `members`, and each is probed."""

    @property
    def members(self) -> tuple[InferenceBackend, ...]:
        """The engines of the pool that can serve requests now."""


class HasStates(InferenceBackend, Protocol):
    """An engine that shows its servers while it runs."""

    def states(self) -> Sequence[EngineState]:
        """The state of each server now, also of those that cannot serve."""


def members_of(engine: InferenceBackend) -> tuple[InferenceBackend, ...]:
    """The members of a pool; for any other engine, the engine alone."""
    return cast(EnginePool, engine).members if engine.capabilities.is_pool else (engine,)


def check_tokens(tokens: Sequence[int], reply: int, vocabulary_size: int, context_max: int, label: str) -> None:
    """Raise InferenceError for ids that crash some engines, and for a context [L] and a reply of up to `reply` tokens
    that do not fit. `context_max` 0: unknown. `label` names the engine.
    """
    assert tokens, "a request needs at least one token of context"
    lowest, highest = min(tokens), max(tokens)
    fault = ""
    if lowest < 0 or highest >= vocabulary_size:
        wrong = lowest if lowest < 0 else highest
        fault = f"token id {wrong} is outside the vocabulary of {vocabulary_size}; is this the model's own tokenizer?"
    elif context_max and len(tokens) + reply > context_max:
        what = (
            f"a context of {len(tokens)} tokens and a reply of up to {reply} do"
            if reply
            else f"{len(tokens)} tokens do"
        )
        fault = f"{what} not fit into the {context_max} of {label}"
    if fault:
        raise InferenceError(fault, is_transient=False)


METHOD_OF = {
    "aborts": "abort",
    "checks": "check",
    "chats": "chat",
    "is_pool": "members",
    "meters": "spending",
    "has_states": "states",
}


def check_engine(engine: Any, name: str) -> InferenceBackend:
    """Return the engine if it has all fields and methods of `InferenceBackend` and of its capabilities.

    Raises ConfigError, which names the component and everything that is missing.
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
                missing.append(f"{method} (its capabilities have {capability}=True)")
            if hasattr(engine, method) and not is_claimed:
                raise ConfigError(
                    f"{own} has the method {method}, but its capabilities do not declare it: set capabilities = "
                    f"Capabilities({capability}=True), or rename the method"
                )
    if missing:
        raise ConfigError(
            f"{own} has no {', no '.join(missing)}; add it to the class: an engine needs every field and method of "
            "rollouts.inference.base.InferenceBackend, see docs/inference.md"
        )
    return cast(InferenceBackend, engine)
