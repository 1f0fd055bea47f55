"""What the loops hand to a training backend: rows of token ids with everything stamped that a loss may need.

Plain data, no torch: a batch can travel to other ranks. Rows come from `rollouts.training.batching`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from rollouts.training.backends.futures import TrainFuture

__all__ = ["ForwardOutput", "Row", "StepResult", "TrainBatch", "TrainingBackend"]


class Row(msgspec.Struct):
    """One sample, ready to be trained on. Lists have the row's length L; position 0 can never be live.

    `loss_mask` weighs tokens (0: not trained). `weights` is u of numerics.md with the mask in it; sum(weights * loss)
    / D is the objective. `advantages` is 0 where the mask is. The first `prefix_length` tokens are the same in every
    row of `group_index`, so that a backend may run them forward once for all of them.
    """

    tokens: list[int]
    loss_mask: list[float]
    weights: list[float]
    advantages: list[float]
    rollout_logprobs: list[float]
    rollout_index: int
    group_index: int
    prefix_length: int = 0
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None


class TrainBatch(msgspec.Struct):
    """Rows for one `forward_backward`. `denominator` is this batch's share of D; the backend sums and divides once,
    in `optim_step`.

    `rewards` [N] is indexed by `rollout_index` (positions of the batch's rollouts, 0..N-1). `algorithm` is the name
    under which the backend was given the algorithm when it was composed; batches carry data and names, never
    functions.
    """

    rows: list[Row]
    denominator: float
    rewards: list[float]
    step: int
    algorithm: str = "main"
    temperature: float = 1.0


class ForwardOutput(NamedTuple):
    """Per row, per token [L] (0.0 at position 0): logprobs of the row's own tokens, and the entropy of the
    prediction.
    """

    logprobs: list[list[float]]
    entropy: list[list[float]] | None


class StepResult(NamedTuple):
    """What an optimizer step did: metrics under the names of numerics.md, and the version of the weights now."""

    metrics: dict[str, float]
    version: int


class TrainingBackend(Protocol):
    """Holds model and optimizer. Every call returns a future at once; submission order is execution order."""

    version: int

    def forward(self, batch: TrainBatch, needs: tuple[str, ...] = ("logprobs",)) -> TrainFuture[ForwardOutput]:
        """Logprobs (and `entropy` if needed; `ref_logprobs` from the reference) without gradient."""
        ...

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[dict[str, float]]:
        """Accumulate gradients and denominators; returns the batch's `policy/...` metrics."""
        ...

    def optim_step(self) -> TrainFuture[StepResult]:
        """Divide by D once, clip, step, zero, version += 1. D = 0 or a non-finite gradient skips the step and says
        so.
        """
        ...

    def get_weights(self, kind: Literal["full", "adapter"] = "full") -> TrainFuture[dict[str, Any]]:
        """A copy of the weights by name."""
        ...

    def load_weights(self, weights: dict[str, Any]) -> TrainFuture[None]:
        """Replace weights by name."""
        ...

    def save(self, path: str) -> TrainFuture[None]:
        """Write weights (loadable by transformers), optimizer and counters into the folder."""
        ...

    def load(self, path: str) -> TrainFuture[None]:
        """Read back what `save` wrote."""
        ...

    def close(self) -> None:
        """End the backend's thread."""
        ...
