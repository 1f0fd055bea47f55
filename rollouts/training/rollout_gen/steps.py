"""AsyncRolloutManager's configuration and results: RolloutConfig, RolloutStep, RolloutStatistics, RolloutBatch.

Plain data, and pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollouts.errors import ConfigError
from rollouts.training.rollout_gen.groups import Group, group_samples
from rollouts.training.samples import with_tensors
from rollouts.types import Sample


@dataclass(frozen=True)
class RolloutConfig:
    """How many prompts and rollouts a step has, and whether it waits for slow groups and replaces dropped ones.

    Args:
        batch_size: groups of a step
        n_samples_per_prompt: rollouts of a group
        over_sampling_factor: ceil(batch_size * factor) groups are in flight; `keep` says which of them are trained
        keep: "first": the step ends when `batch_size` groups are complete; the others continue in the next step.
            "best": the step waits for all of them, and keeps those whose rewards differ most (their standard deviation;
            of equal ones the first)
        generate_fn: generate_fn(prompts) makes the samples of one group. See `user_functions`
        reward_fn: reward_fn(sample) returns the reward
        filter_fn: filter_fn(samples) says whether to keep a group
        concurrency: how many episodes play at once
        refill: replace groups that a filter drops, in at most `refills_max` rounds (dynamic sampling of DAPO)
        generate_seconds: deadline of a call of `generate_fn`
        staleness: how many steps are prefetched while an earlier one is trained
        endpoint: an Endpoint, the model that plays episodes of `environment`, in place of a `generate_fn`
        environment: an environment, as an object or a class
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
    keep: str = "first"
    endpoint: Any = None
    environment: Any = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "n_samples_per_prompt", "concurrency", "refills_max", "generate_seconds"):
            assert getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}"
        assert self.staleness >= 0, f"staleness must be >= 0, got {self.staleness}"
        factor = self.over_sampling_factor
        if not 1 <= factor < math.inf:
            raise ConfigError(f"over_sampling_factor {factor}: expected 1 or more, such as 1.5")
        if (self.endpoint is None) != (self.environment is None):
            raise ConfigError("RolloutConfig: endpoint and environment belong together; give both, or a generate_fn")
        if self.keep not in ("first", "best"):
            raise ConfigError(f'keep is {self.keep!r}; expected "first" or "best"')
        if self.keep == "best" and factor == 1:
            raise ConfigError('keep="best" chooses among more groups than a step needs; give over_sampling_factor=1.5')

    @property
    def in_rounds(self) -> bool:
        """Whether a step waits for all of its groups. If so, a seed determines the result."""
        return self.over_sampling_factor == 1 or self.keep == "best"

    def in_flight(self, groups: int) -> int:
        """How many groups are in flight if a step needs this many."""
        return math.ceil(groups * self.over_sampling_factor)


class RolloutStatistics(NamedTuple):
    """How many groups there are of each kind: begun = kept + dropped + carried + in_flight.

    `kept` and `dropped` groups were returned. `in_flight` groups are being played for the current step. `carried`
    groups wait for the next step.
    """

    begun: int
    kept: int
    dropped: int
    carried: int = 0
    in_flight: int = 0


@dataclass
class RolloutBatch:
    """Rows for training, and metadata.

    `tokens` and `loss_masks` are [row][L]; `rewards` [row] (NaN: not judged); `response_lengths` [row] are the numbers
    of trained tokens.
    """

    tokens: list[list[int]]
    loss_masks: list[list[float]]
    rewards: list[float]
    response_lengths: list[int]
    metadata: dict[str, Any] = field(default_factory=dict)
    rows: Sequence[Sample] = field(default_factory=list, repr=False, compare=False)

    @property
    def samples(self) -> list[Sample]:
        """The rows as samples with tensors: `input_ids`, `labels` and `loss_mask` [L]."""
        return with_tensors(self.rows)


class RolloutStep(RolloutBatch):
    """The groups of one step, sorted by number, dropped ones included, and the seconds that it took to play them. Each
    role of a prompt has a group of its own.

    The fields of RolloutBatch are the rows of the kept groups. They are computed on first use. `metrics` describe
    over-sampling and refilling, and are empty without both.
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
        """The groups that are trained: no filter dropped them."""
        return [group for group in self.groups if group.dropped is None]

    def __getattr__(self, name: str) -> Any:
        if name not in RolloutBatch.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        vars(self).update(vars(convert_to_batch(group_samples(self.kept), self.epoch_id, self.step_id)))
        return vars(self)[name]


def convert_to_batch(samples: Sequence[Sample], epoch_id: int, step_id: int) -> RolloutBatch:
    """Make a batch with one row for each sample."""
    tokens, loss_masks, rewards = extract_sample_fields(samples)
    metadata = build_batch_metadata(samples, epoch_id, step_id)
    return RolloutBatch(tokens, loss_masks, rewards, compute_response_lengths(loss_masks), metadata, samples)


def extract_sample_fields(samples: Sequence[Sample]) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """Tokens, loss masks and rewards (NaN: not judged) of each sample.

    >>> extract_sample_fields([Sample(tokens=[1, 2], loss_mask=[0.0, 1.0], reward=0.5)])
    ([[1, 2]], [[0.0, 1.0]], [0.5])
    """
    rewards = [math.nan if sample.reward is None else float(sample.reward) for sample in samples]
    return [list(sample.tokens) for sample in samples], [list(sample.loss_mask) for sample in samples], rewards


def compute_response_lengths(loss_masks: Sequence[Sequence[float]]) -> list[int]:
    """The number of trained tokens of each row.

    >>> compute_response_lengths([[0.0, 1.0, 1.0], [0.0]])
    [2, 0]
    """
    return [sum(weight > 0 for weight in mask) for mask in loss_masks]


def build_batch_metadata(samples: Sequence[Sample], epoch_id: int, step_id: int) -> dict[str, Any]:
    """`epoch_id`, `step_id`, `num_samples`; and for each row `group_indices`, `statuses`, and every key of the samples'
    metadata (None for samples without it).

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
