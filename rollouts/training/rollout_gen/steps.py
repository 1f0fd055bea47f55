"""What AsyncRolloutManager is given and what it gives: RolloutConfig, RolloutStep, RolloutStatistics; and the rows of a
step as a RolloutBatch. Plain data, and pure functions from samples to batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollouts.errors import ConfigError
from rollouts.training.rollout_gen.groups import Group, group_samples
from rollouts.types import Sample


@dataclass(frozen=True)
class RolloutConfig:
    """How many prompts a step, how many rollouts each, and what is done so that a step does not wait for the slowest.

    `over_sampling_factor` f: ceil(batch_size * f) groups are in flight, the step ends when `batch_size` of them are
    complete, and the others continue in the next one. `refill`: groups that a filter drops are replaced, in at most
    `refills_max` rounds (dynamic sampling as DAPO does it). `concurrency` episodes play at once. `staleness` steps are
    prefetched: played while an earlier one is trained on.

    `generate_fn(prompts)` makes the samples itself, for one group at a time, in at most `generate_seconds`;
    `reward_fn(sample)` gives them their reward; `filter_fn(samples)` sees a group. See `user_functions`.
    """

    batch_size: int
    n_samples_per_prompt: int = 1
    over_sampling_factor: float = 1.0
    generate_fn: Callable[..., Any] | None = None
    reward_fn: Callable[..., Any] | None = None
    filter_fn: Callable[..., Any] | None = None
    concurrency: int = 256
    refill: bool = False
    refills_max: int = 8
    generate_seconds: float = 3600.0
    staleness: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "n_samples_per_prompt", "concurrency", "refills_max", "generate_seconds"):
            assert getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}"
        assert self.staleness >= 0, f"staleness must be >= 0, got {self.staleness}"
        factor = self.over_sampling_factor
        if not 1 <= factor < math.inf:
            raise ConfigError(f"over_sampling_factor {factor}: expected 1 (what a step needs) or more, such as 1.5")

    @property
    def in_rounds(self) -> bool:
        """Whether a step waits for everything that it has begun, so that one seed is one result."""
        return self.over_sampling_factor == 1

    def in_flight(self, groups: int) -> int:
        """How many groups are in flight where so many are wanted."""
        return math.ceil(groups * self.over_sampling_factor)


class RolloutStatistics(NamedTuple):
    """What became of every group begun so far: begun = kept + dropped + carried + in_flight.

    `kept` and `dropped` groups were handed out; `in_flight` ones are being played for the present step, `carried` ones
    wait, between two steps, for the next one.
    """

    begun: int
    kept: int
    dropped: int
    carried: int = 0
    in_flight: int = 0


@dataclass
class RolloutBatch:
    """Rows of training: `tokens` and `loss_masks` [row][L], `rewards` [row] (NaN: not judged), `response_lengths` [row]
    (trained tokens), and what is known besides.
    """

    tokens: list[list[int]]
    loss_masks: list[list[float]]
    rewards: list[float]
    response_lengths: list[int]
    metadata: dict[str, Any] = field(default_factory=dict)


class RolloutStep(RolloutBatch):
    """One step's groups, dropped ones included, by their numbers, and the seconds that it took to play them.

    It is a RolloutBatch too: the rows of the groups that were kept, made when they are asked for. `metrics` say what
    over-sampling and refilling did; empty where neither is on.
    """

    def __init__(
        self,
        groups: list[Group],
        seconds: float,
        *,
        metrics: Mapping[str, float] | None = None,
        epoch_id: int = 0,
        step_id: int = 0,
    ) -> None:
        self.groups = groups
        self.seconds = seconds
        self.metrics = dict(metrics or {})
        self.epoch_id = epoch_id
        self.step_id = step_id

    @property
    def kept(self) -> list[Group]:
        """The groups that no filter dropped."""
        return [group for group in self.groups if group.dropped is None]

    def __getattr__(self, name: str) -> Any:
        if name not in RolloutBatch.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        vars(self).update(vars(convert_to_batch(group_samples(self.kept), self.epoch_id, self.step_id)))
        return vars(self)[name]


def convert_to_batch(samples: Sequence[Sample], epoch_id: int, step_id: int) -> RolloutBatch:
    """The samples as one batch, a row each."""
    tokens, loss_masks, rewards = extract_sample_fields(samples)
    metadata = build_batch_metadata(samples, epoch_id, step_id)
    return RolloutBatch(tokens, loss_masks, rewards, compute_response_lengths(loss_masks), metadata)


def extract_sample_fields(samples: Sequence[Sample]) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """Tokens, loss masks and rewards (NaN: not judged), a row a sample.

    >>> extract_sample_fields([Sample(tokens=[1, 2], loss_mask=[0.0, 1.0], reward=0.5)])
    ([[1, 2]], [[0.0, 1.0]], [0.5])
    """
    rewards = [math.nan if sample.reward is None else float(sample.reward) for sample in samples]
    return [list(sample.tokens) for sample in samples], [list(sample.loss_mask) for sample in samples], rewards


def compute_response_lengths(loss_masks: Sequence[Sequence[float]]) -> list[int]:
    """How many tokens of each row are trained.

    >>> compute_response_lengths([[0.0, 1.0, 1.0], [0.0]])
    [2, 0]
    """
    return [sum(weight > 0 for weight in mask) for mask in loss_masks]


def build_batch_metadata(samples: Sequence[Sample], epoch_id: int, step_id: int) -> dict[str, Any]:
    """`epoch_id`, `step_id`, `num_samples`; and by row `group_indices`, `statuses`, and each key of the samples' own
    metadata (None where a sample does not have it).

    >>> build_batch_metadata([Sample(group_index=3, metadata={"correct": True})], 0, 7)["correct"]
    [True]
    """
    keys = dict.fromkeys(key for sample in samples for key in sample.metadata)
    own = {key: [sample.metadata.get(key) for sample in samples] for key in keys}
    return own | {
        "epoch_id": epoch_id,
        "step_id": step_id,
        "num_samples": len(samples),
        "group_indices": [sample.group_index for sample in samples],
        "statuses": [sample.status.value for sample in samples],
    }
