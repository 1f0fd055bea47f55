"""Evaluation: every held-out task played once, and what came of it in numbers.

Pure over its parts: it plays episodes and aggregates; what is trained or written is not its business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollouts.agent import Episode
from rollouts.inference.base import InferenceBackend
from rollouts.training.rollout_gen.episodes import Job, Play, run_episodes
from rollouts.training.rollout_gen.failures import Failures
from rollouts.training.rollout_gen.group_rewards import GroupScorer
from rollouts.training.rollout_gen.groups import check_judged, reward_metrics
from rollouts.types import Task

__all__ = ["Evaluation", "Report", "evaluate", "summarise"]


class Report(NamedTuple):
    """One pass over the held-out tasks. `reward_mean` is over the `judged` ones, None where there is none.
    `environments` are the same numbers of each, by alias, where there are several.
    """

    reward_mean: float | None
    parts: dict[str, float]
    judged: int
    tasks: int
    environments: Mapping[str, Report] = {}


class Evaluation(NamedTuple):
    """Two passes: sampled (at the run's evaluation temperature) and greedy."""

    sampled: Report
    greedy: Report

    def as_dict(self) -> dict[str, object]:
        """As it stands in summary.json."""
        found: dict[str, object] = {
            "reward_mean": self.sampled.reward_mean,
            "greedy_mean": self.greedy.reward_mean,
            "parts": self.sampled.parts,
            "greedy_parts": self.greedy.parts,
            "tasks": self.sampled.tasks,
            "judged": self.sampled.judged,
        }
        if self.sampled.environments:
            found["environments"] = {alias: own.as_dict() for alias, own in self._own().items()}
        return found

    def as_metrics(self) -> dict[str, float]:
        """As it stands in metrics.jsonl."""
        metrics = {f"eval/{name}": value for name, value in self.sampled.parts.items()}
        for name, report in (("reward_mean", self.sampled), ("greedy_mean", self.greedy)):
            if report.reward_mean is not None:
                metrics[f"eval/{name}"] = report.reward_mean
        for alias, own in self._own().items():
            metrics |= {f"eval/{alias}/{name[5:]}": value for name, value in own.as_metrics().items()}
        return metrics

    def _own(self) -> dict[str, Evaluation]:
        """What it is of each of several environments."""
        greedy = self.greedy.environments
        return {alias: Evaluation(own, greedy[alias]) for alias, own in self.sampled.environments.items()}


async def evaluate(
    tasks: Sequence[Task],
    *,
    play: Play,
    inference: InferenceBackend,
    score_group: GroupScorer | None = None,
    concurrency: int = 256,
    failures: Failures | None = None,
) -> Report:
    """Play each task once. Failed episodes are not judged; RunError where all failed. Raises what `play` raises.
    `failures` as in `run_episodes`.
    """
    jobs = [Job(task, (index, 0)) for index, task in enumerate(tasks)]
    episodes: Sequence[Episode] = await run_episodes(jobs, play, inference, concurrency=concurrency, failures=failures)
    if score_group is not None:
        episodes = [(await score_group([episode]))[0] for episode in episodes]
    check_judged(episodes, "the evaluation")
    return summarise(episodes)


def summarise(episodes: Sequence[Episode]) -> Report:
    """The numbers of these episodes, and of each environment's where they are of several."""
    aliases = sorted({episode.task.env for episode in episodes} - {""})
    whole = _summarise(episodes)
    own = {alias: _summarise([each for each in episodes if each.task.env == alias]) for alias in aliases}
    return whole._replace(environments=own)


def _summarise(episodes: Sequence[Episode]) -> Report:
    metrics = reward_metrics(episodes)
    parts = {
        name: metrics[f"reward/{name}"]
        for episode in episodes
        for name in episode.score.parts
        if f"reward/{name}" in metrics
    }
    judged = sum(episode.score.value is not None for episode in episodes)
    return Report(metrics.get("reward/mean"), parts, judged, len(episodes))
