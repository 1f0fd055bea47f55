"""What the loops hand to a training backend: rows of token ids with everything stamped that a loss may need.

Plain data, no torch: a batch can travel to other ranks. Rows come from `rollouts.training.batching`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from rollouts.training.backends.futures import TorchThread, TrainFuture

Unit = Literal["token", "rollout", "pair"]
"""What a loss returns one value for."""

Anchor = Literal["sampler", "current"]
"""Where a row carries no `old_logprobs`: the anchor is what the sampler said, or the policy as it is (detached)."""


class Row(msgspec.Struct):
    """One sample, ready to be trained on. Lists have the row's length L; position 0 can never be live.

    `loss_mask` weighs tokens (0: not trained). `weights` is u of numerics.md with the mask in it; sum(weights * loss)
    / D is the objective. `advantages` is 0 where the mask is. The first `prefix_length` tokens are the same in every
    row of `group_index`, so that a backend may run them forward once for all of them. `segment` counts the rows of a
    rollout; `pair_index` is -1 where the row is in no pair. `temperature` None is the batch's. `rollout_logprobs` None:
    the sampler's are not known. Such a row is anchored at the policy as it is when the row is first scored.
    """

    tokens: list[int]
    loss_mask: list[float]
    weights: list[float]
    advantages: list[float]
    rollout_logprobs: list[float] | None
    rollout_index: int
    group_index: int
    prefix_length: int = 0
    segment: int = 0
    pair_index: int = -1
    temperature: float | None = None
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    teacher_logprobs: list[float] | None = None
    old_values: list[float] | None = None
    returns: list[float] | None = None


class TrainBatch(msgspec.Struct):
    """Rows for one `forward_backward`. `denominator` is this batch's share of D; the backend sums and divides once,
    in `optim_step`.

    `rewards` [N] is indexed by `rollout_index` (positions of the batch's rollouts, 0..N-1). `algorithm` is the name
    under which the backend was given the algorithm when it was composed; batches carry data and names, never
    functions. `unit` says what a loss returns one value for. `kl_coefficient` None is the algorithm's own.
    """

    rows: list[Row]
    denominator: float
    rewards: list[float]
    step: int
    algorithm: str = "main"
    temperature: float = 1.0
    unit: Unit = "token"
    anchor: Anchor = "sampler"
    kl_coefficient: float | None = None


class AuxiliaryModels(NamedTuple):
    """The models beside the policy; None or empty where a run has none.

    `reference` is the rule by which the reference policy follows the policy; `critic` is `head` (on the policy's
    trunk), or a model's name or folder, trained at `critic_lr`; `teacher` is a model's name or folder, of whose
    likeliest tokens `teacher_top_k` are given.
    """

    reference: Callable[..., Any] | None = None
    critic: str = ""
    critic_lr: float = 1e-5
    teacher: str = ""
    teacher_top_k: int = 32


class ForwardOutput(NamedTuple):
    """Per row, per token [L] (0.0 at position 0, and at masked positions where only live ones were asked for).

    `logprobs` of the row's own tokens and the `entropy` of the prediction, both divided by the temperature;
    `ref_logprobs` under the reference policy, `teacher_logprobs` under the teacher; `values` of the critic for the
    state in which the token was chosen. None where it was not asked for.
    """

    logprobs: list[list[float]] | None = None
    entropy: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    teacher_logprobs: list[list[float]] | None = None
    values: list[list[float]] | None = None


class StepResult(NamedTuple):
    """What an optimizer step did: metrics under the names of numerics.md, and the version of the weights now."""

    metrics: dict[str, float]
    version: int


@runtime_checkable
class RankServer(Protocol):
    """What a distributed backend's factory gives on the ranks above 0, where rank 0 gets the TrainingBackend."""

    def serve(self) -> None:
        """Carry out rank 0's commands until the run is over. Raises where a command fails here."""


class TrainingBackend(Protocol):
    """Holds model and optimizer. Every call returns a future at once; submission order is execution order.

    Every field is required; some may be None, where it says so.
    """

    world_size: int  # the number of ranks
    device: str  # where this process computes: cpu, cuda:0
    compute_dtype: str  # what the layers compute in: a copy of the model in it gives the same numbers
    notes: Sequence[str]  # what a user should know about this model, such as fast paths that it cannot take
    checkpoint_bytes: int | None  # about what a checkpoint takes on the disk; None: unknown
    can_profile: bool  # whether `start_profile` and `stop_profile` may be called
    # The causal LM, which an in-process engine may generate with, on `thread`; None where no process has all weights.
    model: Any
    thread: TorchThread  # where all torch work happens, in order
    # What lies beside the weights in a folder that servers load (rollouts.training.weights.files.ModelFiles); None: the
    # weights cannot be written for servers.
    model_files: Any

    @property
    def version(self) -> int:
        """How many optimizer steps have changed the weights."""

    def forward(
        self, batch: TrainBatch, needs: tuple[str, ...] = ("logprobs",), *, only_live: bool = False
    ) -> TrainFuture[ForwardOutput]:
        """What `needs` names (the fields of ForwardOutput), without gradient; at live positions or at all."""

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[dict[str, float]]:
        """Accumulate gradients and denominators; returns the batch's `policy/...` metrics."""

    def optim_step(self) -> TrainFuture[StepResult]:
        """Divide by D once, clip, step, zero, version += 1. D = 0 or a non-finite gradient skips the step and says
        so.
        """

    def get_weights(self, kind: Literal["full", "adapter"] = "full") -> TrainFuture[dict[str, Any]]:
        """A copy of the weights by name."""

    def load_weights(self, weights: dict[str, Any]) -> TrainFuture[None]:
        """Replace weights by name."""

    def save(self, path: str, state: Mapping[str, Any] | None = None) -> TrainFuture[None]:
        """Write weights (loadable by transformers), optimizer, counters and the run's own `state` (plain data) into
        the folder, which appears whole or not at all. Raises CheckpointError.
        """

    def load(self, path: str) -> TrainFuture[dict[str, Any]]:
        """Read back what `save` wrote; gives the run's own `state`. Raises ConfigError, ModelError."""

    def start_profile(self) -> TrainFuture[None]:
        """Begin to profile what the backend does, on every rank."""

    def stop_profile(self, folder: str) -> TrainFuture[None]:
        """Write what was profiled into `folder`. Raises OutputError."""

    def close(self) -> None:
        """End the backend's thread."""
