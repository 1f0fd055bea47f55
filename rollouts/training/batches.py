"""The data that training loops send to a training backend, and the Protocol of a backend.

Batches are plain data without torch, so they can be sent to other ranks. `rollouts.training.batching` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from rollouts.models.futures import TorchThread, TrainFuture

Unit = Literal["token", "rollout", "pair"]
"""A loss returns one value per token, per rollout or per pair."""

Anchor = Literal["sampler", "current"]
"""What a ratio of a loss compares with, in rows that have no `old_logprobs`: the sampler's logprobs, or those of the
policy before this step, without a gradient.
"""


class Row(msgspec.Struct):
    """One sample that is ready for training. Lists have the row's length L. Position 0 is never trained.

    Attributes:
        loss_mask: the weight of each token. A token with a weight above 0 is live: it is trained. `agent.model` decides
            which tokens were sampled, `samples` which episodes count, and `loops.rl_batch` which of them are too old
            or not selected
        weights: u of docs/formulas.md, with the mask included. The objective is sum(weights * loss) / D
        advantages: 0 where the mask is 0
        rollout_logprobs: logprobs under the sampler; None if they are unknown. The ratio of a loss then compares with
            the logprobs of the first forward pass over the row
        segment: the number of the row within its rollout
        turns: (turn, first token) of each reply; empty: all tokens are of the first turn
        pair_index: -1 if the row is in no pair
        role: the role that the row's sample belongs to; empty in an environment without roles
    """

    tokens: list[int]
    loss_mask: list[float]
    weights: list[float]
    advantages: list[float]
    rollout_logprobs: list[float] | None
    rollout_index: int
    group_index: int
    segment: int = 0
    pair_index: int = -1
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    teacher_logprobs: list[float] | None = None
    old_values: list[float] | None = None
    returns: list[float] | None = None
    role: str = ""
    turns: list[tuple[int, int]] = []


def live_count(row: Row) -> int:
    """The number of live tokens of a row."""
    return len(row.loss_mask) - row.loss_mask.count(0.0)


class TrainBatch(msgspec.Struct):
    """Rows for one `forward_backward`.

    Attributes:
        denominator: this batch's part of D. The backend adds up the parts, and divides once, in `optim_step`
        rewards: [N], indexed by `rollout_index` (0..N-1)
        turn_rewards: [N] lists: the reward of each turn, for advantages of the whole batch. Empty if none asks for them
        algorithm: the name of an algorithm that the backend received when it was made. Batches contain data and names,
            never functions
        unit: whether the loss returns one value per token, per rollout or per pair
        kl_coefficient: None for the algorithm's own coefficient
        record: whether `forward_backward` shall set `recorded`
        recorded: values by name (`logprob`, `entropy`, `weight`, `clipped`), as the bytes of float32 [T]: of the live
            tokens, row by row. Empty if the backend does not record
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
    record: bool = False
    recorded: dict[str, bytes] = {}
    turn_rewards: list[list[float]] = []


class AuxiliaryModels(NamedTuple):
    """The models beside the policy. None or empty: the run has no such model.

    Attributes:
        reference: the rule that updates the reference policy
        critic: `head` for a value head on the policy's trunk, or the name or folder of a model of its own
        critic_lr: the critic's learning rate
        teacher: the name or folder of the teacher model
        teacher_top_k: how many of the teacher's most likely tokens a loss receives
    """

    reference: Callable[..., Any] | None = None
    critic: str = ""
    critic_lr: float = 1e-5
    teacher: str = ""
    teacher_top_k: int = 32


class ForwardOutput(NamedTuple):
    """One value for each token [L] of each row. 0.0 at position 0; with `only_live`, also at masked positions.

    A field is None if it was not requested. Logprobs and entropy are divided by the temperature.

    Attributes:
        logprobs: of the row's own tokens, under the policy
        entropy: of the policy's prediction
        ref_logprobs: under the reference policy
        teacher_logprobs: under the teacher
        values: the critic's value of the state before each token
    """

    logprobs: list[list[float]] | None = None
    entropy: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    teacher_logprobs: list[list[float]] | None = None
    values: list[list[float]] | None = None


class StepResult(NamedTuple):
    """The metrics of an optimizer step, and the version of the weights after it."""

    metrics: dict[str, float]
    version: int


def step_metrics(returned: StepResult | dict[str, float]) -> dict[str, float]:
    """The metrics of an optimizer step. A PyTorchTrainingBackend returns them alone."""
    return returned if isinstance(returned, dict) else returned.metrics


@runtime_checkable
class RankServer(Protocol):
    """What the factory of a distributed backend returns on ranks above 0. On rank 0 it returns a TrainingBackend."""

    def serve(self) -> None:
        """Run the commands of rank 0 until the run ends. Raises the error of a command that fails on this rank."""


class TrainingBackend(Protocol):
    """A model with its optimizer. Every call returns a future at once, and calls run in the order of submission.

    All fields are required. Some may be None, as their comments say.
    """

    world_size: int  # the number of ranks
    device: str  # the device of this process: cpu, cuda:0
    compute_dtype: str  # the dtype in which layers compute; a copy of the model in this dtype gives the same numbers
    notes: Sequence[str]  # for the user: what this model cannot do, such as an optimization that does not apply
    checkpoint_bytes: int | None  # approximate size of a checkpoint on disk; None: unknown
    can_profile: bool  # whether `start_profile` and `stop_profile` are available
    # The causal LM, for an engine in this process that uses it on `thread`. None if no process has all weights.
    model: Any
    thread: TorchThread  # runs all torch work in order
    # The files beside the weights in a folder for servers (rollouts.training.weights.files.ModelFiles). None if the
    # weights cannot be written for servers.
    model_files: Any

    @property
    def version(self) -> int:
        """The number of optimizer steps that changed the weights."""

    def forward(
        self, batch: TrainBatch, needs: tuple[str, ...] = ("logprobs",), *, only_live: bool = False
    ) -> TrainFuture[ForwardOutput]:
        """Compute the fields of ForwardOutput in `needs`, without gradient. `only_live`: at live positions only."""

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[dict[str, float]]:
        """Accumulate gradients and denominators. Returns the `policy/...` metrics of the batch."""

    def optim_step(self) -> TrainFuture[StepResult]:
        """Divide the gradient by D, clip it, step, set the gradient to zero, and increase `version`.

        The step is skipped if D is 0 or the gradient is not finite. The metric `optim/skipped` reports it.
        """

    def get_weights(self, kind: Literal["full", "adapter"] = "full") -> TrainFuture[dict[str, Any]]:
        """A copy of the weights by name."""

    def load_weights(self, weights: dict[str, Any]) -> TrainFuture[None]:
        """Replace weights by name."""

    def save(self, path: str, state: Mapping[str, Any] | None = None) -> TrainFuture[None]:
        """Write weights (in the format of transformers), optimizer, counters and the run's own `state` (plain data).

        The folder appears complete or not at all. Raises CheckpointError.
        """

    def load(self, path: str) -> TrainFuture[dict[str, Any]]:
        """Read what `save` wrote. Returns the run's own `state`. Raises ConfigError, ModelError."""

    def start_profile(self) -> TrainFuture[None]:
        """Start profiling on every rank."""

    def stop_profile(self, folder: str) -> TrainFuture[None]:
        """Write the profile into `folder`. Raises OutputError."""

    def close(self) -> None:
        """Stop the backend's thread."""
