"""From episodes to groups of samples: pure functions.

A group is all rollouts of one prompt. Here a group gets its group rewards, goes through the filters, and becomes
samples numbered for the batch; and here a batch of groups becomes the metrics that people watch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rollouts.agent import Episode
from rollouts.author_code import authors_code, printable
from rollouts.errors import RolloutsError, RunError, words_of
from rollouts.plugins.signature import call_with
from rollouts.training.rollout_gen.failures import failure_metrics
from rollouts.training.samples import episode_samples
from rollouts.types import Sample, Status, Task

__all__ = ["Filter", "Group", "check_judged", "filter_group", "group_samples", "reward_metrics", "rollout_metrics"]

JUDGING = ("reward_failures", "metric_failures")  # counted in the episode: they are not the trajectory's


class Group(NamedTuple):
    """All rollouts of one prompt. `number` is unique in the run; `dropped` says why a filter took the group out of
    training; `samples` are its rows [G] where a `generate_fn` made them, and empty where they are the episodes'.
    """

    number: int
    task: Task
    episodes: tuple[Episode, ...]
    dropped: str | None = None
    samples: tuple[Sample, ...] = ()

    @property
    def rewards(self) -> list[float | None]:
        """One reward a rollout [G]; None where it failed or could not be judged."""
        return [episode.score.value for episode in self.episodes]

    @property
    def lengths(self) -> list[int]:
        """How many tokens of each rollout were sampled [G]; of a `generate_fn`'s samples those that it marked."""
        if self.samples:
            return [sum(weight > 0 for weight in sample.loss_mask) for sample in self.samples]
        return [sum(trajectory.sampled_count for trajectory in episode.trajectories) for episode in self.episodes]


class Filter(NamedTuple):
    """A named group filter and its settings. It gives True to keep, False or a reason to drop."""

    name: str
    function: object
    settings: dict[str, object]


def filter_group(
    group: Group, filters: Sequence[Filter], *, step: int, see: Callable[[Group, int], list[float | None]] | None = None
) -> Group:
    """The group, with `dropped` set by the first filter that refuses it. A group that no reward could judge is
    dropped too. `see` gives the rewards [G] that the advantage will see, of a group and a step; None: the group's own.
    """
    if all(reward is None for reward in group.rewards):
        return group._replace(dropped="no_reward")
    if not filters:
        return group
    available = _FilterNames(group, group.rewards if see is None else see(group, step), step)
    for candidate in filters:
        try:
            with authors_code():
                verdict = call_with(candidate.function, available, candidate.settings)
                kept = isinstance(verdict, str) or bool(verdict)
        except RolloutsError:
            raise
        except Exception as error:  # the author's code may raise anything
            raise RunError(f"the filter {candidate.name} raised {words_of(error)}") from error
        if isinstance(verdict, str):
            return group._replace(dropped=printable(verdict) or candidate.name)
        if not kept:
            return group._replace(dropped=candidate.name)
    return group


class _FilterNames(Mapping[str, Any]):
    """What a filter may name. Samples are made for a filter that names them: they copy every token."""

    def __init__(self, group: Group, rewards: Sequence[float | None], step: int) -> None:
        def samples() -> list[Sample]:
            return [
                dataclasses.replace(each, reward=None if each.reward is None else rewards[each.rollout_index or 0])
                for each in group_samples([group])
            ]

        self._make: dict[str, Callable[[], Any]] = {
            "rewards": lambda: rewards,
            "scores": lambda: group.rewards,
            "parts": lambda: [episode.score.parts for episode in group.episodes],
            "samples": functools.cache(samples),
            "trajectories": lambda: [episode.trajectory for episode in group.episodes],
            "step": lambda: step,
        }

    def __getitem__(self, name: str) -> Any:
        return self._make[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._make)

    def __len__(self) -> int:
        return len(self._make)


def group_samples(groups: Sequence[Group]) -> list[Sample]:
    """All rows of these groups, numbered 0..N-1 by rollout in the order of groups and rollouts."""
    samples: list[Sample] = []
    rollout_index = 0
    for group_index, group in enumerate(groups):
        for index, episode in enumerate(group.episodes):
            if group.samples:
                samples.append(_numbered(group.samples[index], episode, group_index, rollout_index))
            else:
                samples.extend(episode_samples(episode, group_index, rollout_index))
            rollout_index += 1
    return samples


def _numbered(sample: Sample, episode: Episode, group_index: int, rollout_index: int) -> Sample:
    """A sample that was made by a function, with its score and its place; not trained where it may not be."""
    reward = None if episode.status.is_infrastructure else episode.score.value
    is_live = episode.status is Status.COMPLETED and reward is not None
    return dataclasses.replace(
        sample,
        loss_mask=sample.loss_mask if is_live else [0.0] * len(sample.tokens),
        reward=reward,
        status=episode.status,
        parts=dict(episode.score.parts),
        group_index=group_index,
        rollout_index=rollout_index,
    )


def check_judged(episodes: Sequence[Episode], what: str) -> None:
    """Raise RunError, with the commonest reasons, where not one of these episodes could be judged."""
    if not episodes or any(episode.score.value is not None for episode in episodes):
        return
    reasons = Counter(
        f"{episode.status.value}: {episode.trajectory.error or episode.score.why or 'its reward is None'}"
        for episode in episodes
    )
    tally = "\n".join(f"  {count} x {reason}" for reason, count in reasons.most_common(3))
    raise RunError(f"not one of the {len(episodes)} rollouts of {what} could be judged:\n{tally}")


def reward_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """`reward/mean` and `reward/std` over the judged episodes; what authors name is apart from that, so that nothing of
    theirs takes the place of these: `reward_part/<name>` for each part, `metric/<name>` for each @metric.
    """
    rewards = [episode.score.value for episode in episodes if episode.score.value is not None]
    metrics: dict[str, float] = {}
    if rewards:
        metrics["reward/mean"] = statistics.fmean(rewards)
        metrics["reward/std"] = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    names = sorted({name for episode in episodes for name in episode.score.parts})
    for name in names:
        values = [episode.score.parts.get(name) for episode in episodes]
        judged = [value for value in values if value is not None]
        if judged:
            metrics[f"reward_part/{name}"] = statistics.fmean(judged)
    for name in sorted({name for episode in episodes for name in episode.metrics if name.startswith("metric/")}):
        metrics[name] = statistics.fmean(episode.metrics[name] for episode in episodes if name in episode.metrics)
    return metrics


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What a step's rollouts were like, under the names of the metrics page. Empty input gives no metrics."""
    episodes = [episode for group in groups for episode in group.episodes]
    if not episodes:
        return {}
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    statuses = [episode.status for episode in episodes]
    calls = sum(trajectory.metrics.get("tool_calls", 0.0) for trajectory in trajectories)
    failures = sum(trajectory.metrics.get("tool_failures", 0.0) for trajectory in trajectories)
    latencies = sorted(episode.metrics.get("latency_seconds", 0.0) for episode in episodes)
    metrics = reward_metrics(episodes)
    metrics |= {
        "rollout/tokens": sum(sum(group.lengths) for group in groups) / len(episodes),
        "rollout/turns": sum(trajectory.turns for trajectory in trajectories) / len(episodes),
        "rollout/truncated_frac": _fraction(status is Status.TRUNCATED for status in statuses),
        "rollout/infra_fail_frac": _fraction(status.is_infrastructure for status in statuses),
        "rollout/tool_fail_frac": failures / calls if calls else 0.0,
        "rollout/latency_p50": latencies[len(latencies) // 2],
        "rollout/latency_p95": latencies[math.ceil(0.95 * len(latencies)) - 1],
        "group/zero_std_frac": _fraction(_is_flat(group.rewards) for group in groups),
        "group/kept_frac": _fraction(group.dropped is None for group in groups),
    }
    metrics |= failure_metrics(episodes)
    judged = [reward for group in groups for reward in group.rewards if reward is not None]
    if all(reward in (0.0, 1.0) for reward in judged):  # of graded rewards nobody could say which ones pass
        metrics["reward/pass@k"] = _fraction(1.0 in group.rewards for group in groups)
    for name in sorted(_counters(episodes) - {"turns"}):
        # A rollout of an environment's own may count what it likes, but in the place of nothing that is counted here.
        mean = sum(episode.metrics.get(name, 0.0) for episode in episodes) / len(episodes)
        metrics.setdefault(f"rollout/{name}", mean)
    for reason in sorted({group.dropped for group in groups if group.dropped}):
        metrics[f"group/drop/{reason}"] = float(sum(group.dropped == reason for group in groups))
    return metrics


def _counters(episodes: Sequence[Episode]) -> set[str]:
    """The names that the agent loop counts, in trajectories or while judging; an episode without one has 0 of it."""
    counted = {name for episode in episodes for trajectory in episode.trajectories for name in trajectory.metrics}
    return counted | {name for episode in episodes for name in JUDGING if name in episode.metrics}


def _is_flat(rewards: Sequence[float | None]) -> bool:
    judged = [reward for reward in rewards if reward is not None]
    return not judged or max(judged) - min(judged) <= 1e-6


def _fraction(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else 0.0
