"""Evaluate a model on held-out tasks.

A training run calls `evaluate` between its steps. `rollouts eval` reports the result of `numbers_of`. This module runs
episodes and aggregates their results. It does not train, and writes no files.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rollouts.inference.base import InferenceBackend
from rollouts.reducers import MEAN, Reducer, pass_at_k, pass_hat_k, stderr
from rollouts.training.rollout_gen.groups import GroupScorer, check_judged
from rollouts.training.rollout_gen.pool import Failures, Job, OnEnd, Play, run_episodes
from rollouts.training.rollout_gen.steps import reward_metrics
from rollouts.types import Episode, Status, Task


class Evaluation(NamedTuple):
    """The results of two passes over the held-out tasks, from `numbers_of`: sampled at the temperature of the run, and
    greedy.
    """

    sampled: Mapping[str, Any]
    greedy: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The results for summary.json."""
        found = {
            "reward_mean": self.sampled["reward_mean"],
            "reward_stderr": self.sampled["reward_stderr"],
            "greedy_mean": self.greedy["reward_mean"],
            "greedy_stderr": self.greedy["reward_stderr"],
            "parts": self.sampled["parts"],
            "greedy_parts": self.greedy["parts"],
        }
        of_sampled = ("weights", "metrics", "tool_calls", "tool_failures", "tasks", "judged")
        found |= {name: self.sampled[name] for name in of_sampled}
        several = {}
        for kind in ("environments", "roles"):  # if every episode of a pass failed, its roles may be unknown
            both = self.sampled.get(kind, {}), self.greedy.get(kind, {})
            if own := {name: Evaluation(both[0][name], both[1][name]) for name in both[0] if name in both[1]}:
                several[kind] = {name: each.as_dict() for name, each in own.items()}
        return found | several


def evaluation_metrics(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """The metrics for loggers, from the results of an evaluation in the form of summary.json (`Evaluation.as_dict`).

    >>> evaluation_metrics({"reward_mean": 0.5, "greedy_mean": None, "parts": {"correct": 0.5}})
    {'eval/reward_part/correct': 0.5, 'eval/reward_mean': 0.5}
    """
    metrics = {f"eval/reward_part/{name}": value for name, value in evaluation["parts"].items()}
    metrics |= {f"eval/metric/{name}": value for name, value in evaluation.get("metrics", {}).items()}
    means = {name: evaluation[name] for name in ("reward_mean", "greedy_mean")}
    metrics |= {f"eval/{name}": mean for name, mean in means.items() if mean is not None}
    several = dict(evaluation.get("environments", {}))
    several |= {f"role/{role}": own for role, own in evaluation.get("roles", {}).items()}
    for place, own in several.items():
        metrics |= {f"eval/{place}/{name[5:]}": value for name, value in evaluation_metrics(own).items()}
    return metrics


def is_within_noise(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether the sampled reward of two evaluations differs by less than two standard errors of the difference. The
    evaluations are in the form of summary.json; an older one without standard errors gives False.
    """
    first, last, *errors = (each.get(name) for name in ("reward_mean", "reward_stderr") for each in (before, after))
    if first is None or last is None or None in errors:
        return False
    return bool(abs(last - first) < 2 * math.hypot(*filter(None, errors)))


async def evaluate(
    tasks: Sequence[Task],
    *,
    play: Play,
    inference: InferenceBackend,
    score_groups: GroupScorer | None = None,
    concurrency: int = 256,
    failures: Failures | None = None,
    on_end: OnEnd | None = None,
) -> tuple[dict[str, Any], list[Episode]]:
    """Run one episode of each task. Returns the numbers (see `numbers_of`) and the episodes, in the order of the tasks.

    Failed episodes are not judged. `failures` and `on_end` are passed to `run_episodes`. Raises what `play` raises.
    """
    jobs = [Job(task, (index, 0)) for index, task in enumerate(tasks)]
    episodes = await run_episodes(jobs, play, inference, concurrency=concurrency, failures=failures, on_end=on_end)
    if score_groups is not None:
        episodes = [each for (each,) in await score_groups([[episode] for episode in episodes])]
    return numbers_of([[episode] for episode in episodes]), episodes


def check_passes(reports: Sequence[Mapping[str, Any]], episodes: Sequence[Episode], when: str) -> Iterator[str]:
    """A note for each pass without any judged rollout: its reward is missing. `reports` are the numbers of the sampled
    and the greedy pass, `episodes` those of both, and `when` is "before", "after" or "step N".

    Raises RewardError or RunError if neither pass has a judged rollout.
    """
    passes = dict(zip(("sampled", "greedy"), reports, strict=True))
    counts = ", ".join(f"{numbers['episodes']} {name}" for name, numbers in passes.items())
    moment = {"before": "before training", "after": "after training"}.get(when, f"at {when}")
    check_judged(episodes, f"the evaluation {moment} ({counts})")
    for name, numbers in passes.items():
        if not numbers["judged"]:
            without = f"not one of the {numbers['episodes']} {name} rollouts could be judged"
            if numbers["episodes"] == 1:
                without = f"the only {name} rollout could not be judged"
            yield f"held-out, {when}: {without}, so this evaluation has no {name} reward"


def numbers_of(groups: Sequence[Sequence[Episode]], reducer: Reducer = MEAN) -> dict[str, Any]:
    """The results of an evaluation as numbers. A group has the episodes of one task. All groups have the same size,
    unless the evaluation was interrupted. With several environments, the key `environments` has the results of each,
    and with roles the key `roles`. The rewards of all roles together are the means over roles.

    `reward_stderr` is the standard error of the mean over tasks, not over episodes, because episodes of one task are
    not independent. `pass@k` and `pass^k` are given if every reward is 0 or 1. The means leave out episodes that failed
    because of the infrastructure.

    With a `reducer` other than the mean, `reduce` is its name, and `reduced_mean` and `reduced_stderr` are over tasks,
    each of which has one number. With roles, it is the mean over the roles, each reduced by itself.
    """
    aliases = sorted({episode.task.env for group in groups for episode in group} - {""})
    found = _numbers(groups, reducer)
    if aliases:
        found["environments"] = {
            alias: _numbers([group for group in groups if group and group[0].task.env == alias], reducer)
            for alias in aliases
        }
    return found


def _numbers(groups: Sequence[Sequence[Episode]], reducer: Reducer) -> dict[str, Any]:
    """The numbers of these groups, and of each role in them."""
    found = _numbers_of_all(groups, reducer)
    roles = dict.fromkeys(result.role for group in groups for episode in group for result in episode.roles)
    if roles:
        own = {
            role: [[e for each in group for e in each.by_role if e.role == role] for group in groups] for role in roles
        }
        found["roles"] = {role: _numbers_of_all(of_role, reducer) for role, of_role in own.items()}
    return found


def _numbers_of_all(groups: Sequence[Sequence[Episode]], reducer: Reducer) -> dict[str, Any]:
    episodes = [episode for group in groups for episode in group]
    judged = [[e.score.value for e in group if e.score.value is not None] for group in groups]
    means = [statistics.fmean(rewards) for rewards in judged if rewards]
    played = [each for episode in episodes for each in episode.by_role]
    metrics = reward_metrics(played)
    calls, failed_calls = (_total(episodes, name) for name in ("tool_calls", "tool_failures"))
    counted = ("prompt_tokens", "completion_tokens")
    statuses = Counter(episode.status for episode in episodes)
    cut = sum(any(each.status is Status.TRUNCATED for each in episode.by_role) for episode in episodes)
    return {
        "reward_mean": metrics.get("reward/mean"),
        "reward_stderr": stderr(means),
        **_reduced_numbers(groups, reducer),
        "pass@k": _passes(judged, pass_at_k),
        "pass^k": _passes(judged, pass_hat_k),
        "parts": {name[12:]: value for name, value in metrics.items() if name.startswith("reward_part/")},
        "weights": {name: weight for e in played for name, weight in e.score.weights.items()},
        "metrics": {name[7:]: value for name, value in metrics.items() if name.startswith("metric/")},
        "tasks": len(groups),
        "episodes": len(episodes),
        "judged": sum(map(len, judged)),
        "truncated": cut,
        "failed": {status.value: n for status, n in sorted(statuses.items()) if status.is_infrastructure},
        "turns_mean": statistics.fmean(e.trajectory.turns for e in played) if played else None,
        "tool_calls": int(calls),
        "tool_failures": int(failed_calls),
        "tokens": {name: int(_total(episodes, name)) for name in counted if any(name in e.metrics for e in episodes)}
        or {"completion_tokens": sum(t.sampled_count for e in episodes for t in e.trajectories)},
        "latency_p50": statistics.median(e.metrics.get("latency_seconds", 0.0) for e in episodes) if episodes else None,
    }


def _reduced_numbers(groups: Sequence[Sequence[Episode]], reducer: Reducer) -> dict[str, Any]:
    """What `reducer` makes of the groups; nothing for the mean, which `reward_mean` is."""
    if reducer.how == "mean":
        return {}
    found = [value for group in groups if (value := _reduced(group, reducer)) is not None]
    return {
        "reduce": reducer.how,
        "reduced_mean": statistics.fmean(found) if found else None,
        "reduced_stderr": stderr(found),
    }


def _reduced(group: Sequence[Episode], reducer: Reducer) -> float | None:
    """One number for the judged episodes of a task; None if there are none."""
    own: dict[str, list[tuple[float, str]]] = {}
    for each in sorted((e for whole in group for e in whole.by_role), key=lambda each: each.order):
        if each.score.value is not None:
            own.setdefault(each.role, []).append((each.score.value, each.trajectory.last_text))
    reduced = [reducer.reduce(*zip(*pairs, strict=True)) for pairs in own.values()]
    return statistics.fmean(reduced) if reduced else None


def _passes(judged: Iterable[Sequence[float]], estimate: Callable[[int, int, int], float]) -> dict[str, float]:
    """The mean over tasks of an estimate for k = 1, 2, 4 … up to the smallest number of samples of a task; empty if a
    reward is neither 0 nor 1.
    """
    groups = [rewards for rewards in judged if rewards]
    if not groups or any(reward not in (0.0, 1.0) for rewards in groups for reward in rewards):
        return {}
    fewest = min(map(len, groups))
    ks = sorted({2**power for power in range(fewest.bit_length()) if 2**power <= fewest} | {fewest})
    return {str(k): statistics.fmean(estimate(len(each), int(sum(each)), k) for each in groups) for k in ks}


def _total(episodes: Iterable[Episode], name: str) -> float:
    return sum(episode.metrics.get(name, 0.0) for episode in episodes)
