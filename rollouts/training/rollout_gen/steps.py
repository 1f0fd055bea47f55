"""AsyncRolloutManager's configuration and results: RolloutConfig, RolloutStep, RolloutStatistics, RolloutBatch.

Plain data, and pure functions.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollouts.errors import ConfigError
from rollouts.training.filters import nonzero_std
from rollouts.training.rollout_gen.groups import Group, group_samples
from rollouts.training.samples import with_tensors
from rollouts.types import Episode, Sample, Status


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
