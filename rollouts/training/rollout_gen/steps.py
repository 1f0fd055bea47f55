"""The settings of a step of rollouts (StepSettings), its result (RolloutStep), and its metrics. Plain data."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from rollouts.errors import ConfigError
from rollouts.training.filters import nonzero_std
from rollouts.training.rollout_gen.groups import Group, LiveGroup
from rollouts.types import Episode, Status


@dataclass(frozen=True)
class StepSettings:
    """How many prompts and rollouts a step has, and whether it waits for slow groups and replaces dropped ones.

    Args:
        batch_size: groups of a step
        n_samples_per_prompt: rollouts of a group
        over_sampling_factor: ceil(batch_size * factor) groups are in flight; `keep` says which of them are trained
        keep: "first": the step ends when `batch_size` groups are complete; the others continue in the next step.
            "best": the step waits for all of them, and keeps those whose rewards differ most (their standard deviation;
            of equal ones the first)
        concurrency: how many episodes play at once
        refill: replace groups that a filter drops, in at most `refills_max` rounds (dynamic sampling of DAPO)
        staleness: how many steps are prefetched while an earlier one is trained
    """

    batch_size: int
    n_samples_per_prompt: int = 1
    over_sampling_factor: float = 1.0
    _: KW_ONLY
    concurrency: int = 256
    refill: bool = False
    refills_max: int = 8
    staleness: int = 0
    keep: str = "first"

    def __post_init__(self) -> None:
        for name in ("batch_size", "n_samples_per_prompt", "concurrency", "refills_max"):
            assert getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}"
        assert self.staleness >= 0, f"staleness must be >= 0, got {self.staleness}"
        factor = self.over_sampling_factor
        if not 1 <= factor < math.inf:
            raise ConfigError(f"over_sampling_factor {factor}: expected 1 or more, such as 1.5")
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
class RolloutStep:
    """The groups of one step, sorted by number, dropped ones included. Each role of a prompt has a group of its own.

    Attributes:
        seconds: how long it took to play them
        metrics: describe over-sampling and refilling; empty without both
        live: the groups as a checkpoint stores them, while the step is prefetched
    """

    groups: list[Group]
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    epoch_id: int = 0
    step_id: int = 0
    live: Sequence[LiveGroup] = ()

    @property
    def kept(self) -> list[Group]:
        """The groups that are trained: no filter dropped them."""
        return [group for group in self.groups if group.dropped is None]


# --- metrics ----------------------------------------------------------------------------------------------------------


JUDGING = ("reward_failures", "metric_failures")  # counts of the episode, not of a trajectory


def reward_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """`reward/mean` and `reward/std` of the judged episodes, `reward_part/<name>` for each part of the reward, and
    `metric/<name>` for each @metric. Authors' names have prefixes of their own, so they cannot replace another metric.
    """
    rewards = [episode.score.value for episode in episodes if episode.score.value is not None]
    metrics: dict[str, float] = {}
    if rewards:
        metrics["reward/mean"] = statistics.fmean(rewards)
        metrics["reward/std"] = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    for name in sorted({name for episode in episodes for name in episode.score.parts}):
        judged = [part for episode in episodes if (part := episode.score.parts.get(name)) is not None]
        if judged:
            metrics[f"reward_part/{name}"] = statistics.fmean(judged)
    for name in sorted({name for episode in episodes for name in episode.metrics if name.startswith("metric/")}):
        metrics[name] = statistics.fmean(episode.metrics[name] for episode in episodes if name in episode.metrics)
    return metrics


def failure_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """`rollout/fail/<status>`: the fraction of episodes with this status, for each failed status that occurred."""
    counts = Counter(episode.status.value for episode in episodes if episode.status.is_infrastructure)
    return {f"rollout/fail/{status}": count / len(episodes) for status, count in sorted(counts.items())}


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The metrics of a step's rollouts; none for empty input."""
    episodes = [episode for group in groups for episode in group.episodes]
    if not episodes:
        return {}
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    calls = sum(trajectory.metrics.get("tool_calls", 0.0) for trajectory in trajectories)
    failures = sum(trajectory.metrics.get("tool_failures", 0.0) for trajectory in trajectories)
    latencies = sorted(episode.metrics.get("latency_seconds", 0.0) for episode in episodes)
    metrics = reward_metrics(episodes)
    metrics |= {
        "rollout/tokens": sum(sum(group.lengths) for group in groups) / len(episodes),
        "rollout/turns": sum(trajectory.turns for trajectory in trajectories) / len(episodes),
        "rollout/truncated_frac": statistics.fmean(episode.status is Status.TRUNCATED for episode in episodes),
        "rollout/infra_fail_frac": statistics.fmean(episode.status.is_infrastructure for episode in episodes),
        "rollout/tool_fail_frac": failures / calls if calls else 0.0,
        "rollout/latency_p50": latencies[len(latencies) // 2],
        "rollout/latency_p95": latencies[math.ceil(0.95 * len(latencies)) - 1],
        "group/zero_std_frac": statistics.fmean(nonzero_std(group.rewards) is not True for group in groups),
        "group/kept_frac": statistics.fmean(group.dropped is None for group in groups),
    }
    metrics |= failure_metrics(episodes) | role_metrics(groups)
    judged = [reward for group in groups for reward in group.rewards if reward is not None]
    if all(reward in (0.0, 1.0) for reward in judged):  # other rewards do not say which rollouts are right
        metrics["reward/pass@k"] = statistics.fmean(1.0 in group.rewards for group in groups)
    # Counts of the agent loop, in trajectories and from judging. An episode without a count has 0.
    counted = {name for trajectory in trajectories for name, count in trajectory.metrics.items() if count}
    counted |= {name for episode in episodes for name in JUDGING if name in episode.metrics}
    for name in sorted(counted - {"turns"}):
        # An environment's own rollout may report any metric, but must not replace a metric of this function.
        mean = sum(episode.metrics.get(name, 0.0) for episode in episodes) / len(episodes)
        metrics.setdefault(f"rollout/{name}", mean)
    dropped = Counter(group.dropped for group in groups if group.dropped)
    return metrics | {f"group/drop/{reason}": float(count) for reason, count in sorted(dropped.items())}


def role_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`role/<name>/...` for each role of the environment; `env/<alias>/role/<name>/...` if there are several
    environments. Empty without roles.

    The metrics are `reward` (the mean), `reward_part/<name>`, `metric/<name>`, `kept_frac`, `zero_std_frac`, and the
    means of `tokens` and `turns`.
    """
    metrics: dict[str, float] = {}
    for alias, role in sorted({(group.task.env, group.role) for group in groups if group.role}):
        own = [group for group in groups if (group.task.env, group.role) == (alias, role)]
        episodes = [episode for group in own for episode in group.episodes]
        values = _by_name(episodes) | {
            "kept_frac": sum(group.dropped is None for group in own) / len(own),
            "zero_std_frac": statistics.fmean(nonzero_std(group.rewards) is not True for group in own),
            "tokens": sum(sum(group.lengths) for group in own) / len(episodes),
            "turns": sum(episode.metrics.get("turns", 0.0) for episode in episodes) / len(episodes),
        }
        place = f"env/{alias}/role/{role}" if alias else f"role/{role}"
        metrics |= {f"{place}/{name}": value for name, value in values.items()}
    return metrics


def _by_name(episodes: Sequence[Episode]) -> dict[str, float]:
    """The rewards and metrics of one environment or role: `reward` is the mean."""
    rewards = reward_metrics(episodes)
    named = {name: value for name, value in rewards.items() if not name.startswith("reward/")}
    return named | ({"reward": rewards["reward/mean"]} if "reward/mean" in rewards else {})


def environment_metrics(groups: Sequence[Group], epochs: Mapping[str, int]) -> dict[str, float]:
    """`env/<alias>/...` for each environment with a group in this step; empty if there is only one environment.

    The metrics are `reward` (the mean), `reward_part/<name>`, `metric/<name>`, `share` (the fraction of prompts),
    `kept_frac`, `infra_fail_frac` and `epoch`.
    """
    metrics: dict[str, float] = {}
    for alias in sorted({group.task.env for group in groups} - {""}):
        own = [group for group in groups if group.task.env == alias]
        episodes = [episode for group in own for episode in group.episodes]
        values = _by_name(episodes) | {
            "share": len({group.number for group in own}) / len({group.number for group in groups}),
            "kept_frac": sum(group.dropped is None for group in own) / len(own),
            "infra_fail_frac": sum(episode.status.is_infrastructure for episode in episodes) / len(episodes),
            "epoch": float(epochs.get(alias, 0)),
        }
        metrics |= {f"env/{alias}/{name}": value for name, value in values.items()}
    return metrics
