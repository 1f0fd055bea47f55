"""What AsyncRolloutManager is told and what it gives: RolloutConfig, RolloutStep, RolloutStatistics. Plain data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollouts.errors import ConfigError
from rollouts.training.rollout_gen.groups import Group, group_samples
from rollouts.training.rollout_gen.rollout_generation import RolloutBatch, convert_to_batch

__all__ = ["RolloutConfig", "RolloutStatistics", "RolloutStep"]


@dataclass(frozen=True)
class RolloutConfig:
    """How many prompts a step, how many rollouts each, and what is done so that a step does not wait for the slowest.

    `over_sampling_factor` f: ceil(batch_size * f) groups are in flight, the step ends when `batch_size` of them are
    complete, and the others go on in the next one. `refill`: groups that a filter drops are replaced, in at most
    `refills_max` rounds (dynamic sampling as DAPO does it). `concurrency` episodes play at once. `staleness` steps are
    played ahead of the one that is trained on.

    `generate_fn(prompts)` makes the samples itself, for one group at a time, in at most `generate_seconds`;
    `reward_fn(sample)` gives them their reward; `filter_fn(samples)` sees a group. See `rollout_generation`.
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
            raise ConfigError(
                f"over_sampling_factor {factor}: expected a number from 1 on; 1 plays what a step needs, 1.5 half as "
                "much again, so that nobody waits for the slowest"
            )

    @property
    def in_rounds(self) -> bool:
        """Whether a step waits for everything that it has begun, so that one seed is one result."""
        return self.over_sampling_factor == 1

    def ahead(self, groups: int) -> int:
        """How many groups are in flight where so many are wanted."""
        return math.ceil(groups * self.over_sampling_factor)


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
        self._epoch_id = epoch_id
        self._step_id = step_id

    @property
    def kept(self) -> list[Group]:
        """The groups that no filter dropped."""
        return [group for group in self.groups if group.dropped is None]

    def __getattr__(self, name: str) -> Any:
        if name not in _BATCH_FIELDS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        batch = convert_to_batch(group_samples(self.kept), self._epoch_id, self._step_id)
        for field in _BATCH_FIELDS:
            setattr(self, field, getattr(batch, field))
        return getattr(self, name)


_BATCH_FIELDS = tuple(field.name for field in dataclasses.fields(RolloutBatch))


class RolloutStatistics(NamedTuple):
    """What became of every group begun so far: begun = kept + dropped + carried + in_flight.

    `kept` and `dropped` groups were handed out; `in_flight` ones are being played for the present step, `carried` ones
    wait, between two steps, to be played on.
    """

    begun: int
    kept: int
    dropped: int
    carried: int = 0
    in_flight: int = 0
