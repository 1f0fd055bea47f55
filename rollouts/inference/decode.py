"""Sample one wave of requests: the loop, and where a session's cache is kept between its turns.

The loop knows nothing of caches: it asks *lanes* (`lanes.py` or `plain.py`) for the logits of the rows now decoding,
samples each row from its own stream, lets finished rows leave at once and rows still queued join. Everything here
runs in the torch thread. Given the same rows in the same order it does the same operations; nothing depends on time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from rollouts.errors import InferenceError
from rollouts.inference.sampling import UniformStream, sample

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Lanes",
    "Network",
    "Row",
    "SavedCache",
    "SessionCaches",
    "Statistics",
    "common_prefix",
    "decode",
    "evaluating",
]


class SavedCache(NamedTuple):
    """A session's keys and values [layers, heads, K, dim] for `tokens` [K], computed by policy `version`."""

    version: int
    tokens: list[int]
    keys: Tensor
    values: Tensor

    @property
    def bytes(self) -> int:
        """Memory it holds."""
        return int(self.keys.nbytes + self.values.nbytes)


@dataclass(eq=False)
class Row:
    """One request while it is decoded. `abandoned`, set from any thread, makes the row leave at the next step."""

    tokens: list[int]
    max_tokens: int
    stop_ids: frozenset[int]
    temperature: float
    stream: UniformStream
    session: str | None = None
    label: Any = None
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    saved: SavedCache | None = None
    cached: int = 0  # leading tokens of `tokens` whose keys and values come from `saved`
    abandoned: bool = False

    @property
    def length(self) -> int:
        """Tokens whose keys and values exist while the row decodes: all but the one sampled last."""
        return len(self.tokens) + len(self.sampled) - 1

    @property
    def width_max(self) -> int:
        """Columns it may come to need."""
        return len(self.tokens) + self.max_tokens

    @property
    def finish(self) -> Literal["stop", "length"] | None:
        """Why it is over, or None."""
        if self.sampled and self.sampled[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.sampled) >= self.max_tokens else None


@dataclass
class Statistics:
    """Counts since the engine started: waves and forward passes, and tokens prefilled, reused from caches, sampled."""

    waves: int = 0
    passes: int = 0
    prefilled: int = 0
    reused: int = 0
    sampled: int = 0


class Network:
    """A causal LM of transformers, seen as a function from ids to the logits of each row's last position [n, V].

    `forward` takes the model's own keyword arguments; only the last position goes through the LM head.
    """

    def __init__(self, model: Any, statistics: Statistics | None = None) -> None:
        import inspect

        # LoRA layers live inside the base model, so peft's wrapper adds nothing but time to each pass.
        promptless = not any(c.is_prompt_learning for c in getattr(model, "peft_config", {}).values())
        unwrap = getattr(model, "get_base_model", None)
        self.model = unwrap() if unwrap is not None and promptless else model
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in parameters:
            self._options["logits_to_keep"] = 1
        self.statistics = statistics if statistics is not None else Statistics()

    @property
    def device(self) -> torch.device:
        """Where ids go: the device of the embedding."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def forward(self, ids: Tensor, **arguments: Any) -> tuple[Tensor, Any]:
        """Last logits [n, V] and the cache that the model used, for ids [n, S]."""
        self.statistics.passes += 1
        output = self.model(input_ids=ids, **self._options, **arguments)
        return output.logits[:, -1], getattr(output, self.cache_name, None)


class Lanes(Protocol):
    """Rows decoded side by side. The loop owns which rows those are; lanes own their caches, in the same order."""

    def take(self, active: int, queue: list[Row]) -> list[Row]:
        """Take off the queue the rows that join `active` others now; may be none while active > 0."""
        ...

    def admit(self, rows: list[Row], active: int) -> tuple[list[Row], Tensor]:
        """Prefill them behind the active ones; returns them in lane order with their logits [m, V]."""
        ...

    def step(self, rows: list[Row]) -> Tensor:
        """Feed each row its token sampled last; returns logits [n, V]."""
        ...

    def release(self, rows: list[Row], finished: list[int]) -> list[Row]:
        """Save what sessions keep, drop the finished lanes; returns the rows that remain, in their new lane order."""
        ...


def decode(lanes: Lanes, queue: list[Row], deliver: Callable[[list[Row]], None], statistics: Statistics) -> None:
    """Run until queue and lanes are empty; `deliver` gets rows as soon as they finish. Empties `queue`.

    Raises InferenceError where the model's logits are not finite.
    """
    active: list[Row] = []
    while queue or active:
        if any(row.abandoned for row in queue):
            deliver([row for row in queue if row.abandoned])
            queue[:] = [row for row in queue if not row.abandoned]
            continue
        joining = lanes.take(len(active), queue)
        if joining:
            drawing, logits = lanes.admit(joining, len(active))
            active += drawing
        else:
            drawing, logits = active, lanes.step(active)
        ids, logprobs = sample(logits, [row.stream.draw() for row in drawing], [row.temperature for row in drawing])
        if not all(map(math.isfinite, logprobs)):
            raise InferenceError(
                "the model's logits are not finite, so nothing can be sampled. Its weights have diverged: "
                "take an earlier checkpoint or a smaller --lr"
            )
        statistics.sampled += len(drawing)
        for row, token, logprob in zip(drawing, ids, logprobs, strict=True):
            row.sampled.append(token)
            row.logprobs.append(logprob)
        finished = [index for index, row in enumerate(active) if row.abandoned or row.finish is not None]
        if finished:
            done = [active[index] for index in finished]
            active = lanes.release(active, finished)
            deliver(done)


class SessionCaches:
    """The caches that live sessions keep between turns, at most `bytes_max` in all.

    The trio side opens and closes sessions, the torch thread stores and reads: hence the lock. A cache is dropped
    when its session closes or when the weights have changed.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._live: dict[str, SavedCache | None] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return sum(1 for saved in self._live.values() if saved is not None)

    def open(self, session: str) -> None:
        """From now on the session may store a cache."""
        with self._lock:
            self._live.setdefault(session, None)

    def close(self, session: str) -> None:
        """Drop what the session kept; harmless if it is not open."""
        with self._lock:
            self._forget(session)
            self._live.pop(session, None)

    def has_room(self, session: str, size: int) -> bool:
        """Whether the session is live and `size` bytes more may be kept."""
        with self._lock:
            return session in self._live and self._bytes + size <= self.bytes_max

    def store(self, session: str, saved: SavedCache) -> None:
        """Keep it, unless the session has closed meanwhile."""
        with self._lock:
            if session in self._live:
                self._forget(session)
                self._live[session] = saved
                self._bytes += saved.bytes

    def take(self, session: str, version: int) -> SavedCache | None:
        """Hand over what the session kept; None if there is nothing, or other weights computed it."""
        with self._lock:
            saved = self._live.get(session)
            self._forget(session)
        return saved if saved is not None and saved.version == version else None

    def _forget(self, session: str) -> None:
        saved = self._live.get(session)
        if saved is not None:
            self._live[session] = None
            self._bytes -= saved.bytes


def common_prefix(left: list[int], right: list[int]) -> int:
    """How many leading tokens two lists share.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    return next(index for index in range(size) if left[index] != right[index])


def evaluating(model: Any) -> AbstractContextManager[None]:
    """No gradients, and every module in eval mode; leaving restores exactly the modules that were training."""
    return _evaluating(model)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    # Not inference_mode: what a module caches in passing (rotary tables) is used in training too.
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
