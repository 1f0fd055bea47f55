"""What runs earned on their held-out tasks, by how much one earned more than another on the same tasks, and how well a
mean over several runs is known.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollouts.disk import open_regular
from rollouts.errors import UserError, counted
from rollouts.reducers import Reducer
from rollouts.runs.folder import EVALUATED, OTHERS, SUMMARY, phases_of, read_config, read_json
from rollouts.types import Message, Task, Trajectory

RESAMPLES = 10_000
TASKS_MIN = 5
"""A paired comparison of fewer tasks has no interval. A bootstrap of 2 tasks covers the truth in half of the cases."""


class RunEvaluation(NamedTuple):
    """What a run earned on its held-out tasks, and the standard error; None if nothing could be judged. A run that
    trains has been evaluated `before` and `after`. `reduce` says how the samples of a task became one reward. `failed`
    episodes have no reward. With several environments, `environments` has the reward and the standard error of each.
    """

    when: str
    tasks: int
    reward: float | None
    stderr: float | None
    greedy: float | None
    reduce: str = "mean"
    failed: int = 0
    environments: Mapping[str, tuple[float | None, float | None]] = {}


class Paired(NamedTuple):
    """How much more the second run earns than the first, over `tasks` tasks of both: the mean difference, and its 95 %
    interval, which is infinite for fewer than TASKS_MIN tasks. `left_out` tasks were judged in one of them alone.
    """

    difference: float
    low: float
    high: float
    tasks: int
    left_out: int

    @property
    def verdict(self) -> str:
        """`better` or `worse` if the interval excludes 0."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "no difference shown"

    def words(self, name: str, first: str) -> str:
        """The comparison in one line. `name` and `first` are the names of the second and the first run."""
        left_out = f"; {counted(self.left_out, 'task')} of one alone" if self.left_out else ""
        if self.tasks < TASKS_MIN:
            return (
                f"{name} against {first}: no verdict, because both have only {counted(self.tasks, 'task')}, and it "
                f"takes {TASKS_MIN}; the mean difference is {self.difference:+.3f}{left_out}"
            )
        return (
            f"{name} against {first}: {self.verdict}, {self.difference:+.3f} with the 95 % interval "
            f"{self.low:+.3f} to {self.high:+.3f}, over {counted(self.tasks, 'task')} of both{left_out}"
        )

    def as_json(self) -> dict[str, Any]:
        """The fields and the verdict, with None in place of an interval that is infinite and of its verdict."""
        none = {} if math.isfinite(self.low) else {"low": None, "high": None, "verdict": None}
        return {**self._asdict(), "verdict": self.verdict, **none}


def evaluations_of(folder: Path) -> list[RunEvaluation]:
    """The evaluations in a run's summary: one of an evaluation, up to two of a run that trains."""
    summary = read_json(folder / SUMMARY)
    if "reward_mean" in summary:
        return [_evaluation("", summary)]
    trained = summary.get("evaluation") or {}
    return [_evaluation(when, trained[when]) for when in ("before", "after") if trained.get(when)]


def _evaluation(when: str, found: Mapping[str, Any]) -> RunEvaluation:
    kind = "reduced" if "reduce" in found else "reward"
    both = f"{kind}_mean", f"{kind}_stderr"
    mean, error, greedy = (found.get(name) for name in (*both, "greedy_mean"))
    own = {env: (each.get(both[0]), each.get(both[1])) for env, each in found.get("environments", {}).items()}
    failed = sum((found.get("failed") or {}).values())
    return RunEvaluation(when, found.get("tasks", 0), mean, error, greedy, found.get("reduce", "mean"), failed, own)


class _Line(msgspec.Struct):
    """What a paired comparison needs of a line of an evaluation's trajectories."""

    task: Task
    reward: float | None
    group: int = 0
    rollout: int = 0
    role: str = ""
    why: str = ""
    judged: bool | None = None
    temperature: float = 1.0
    messages: msgspec.Raw = msgspec.Raw(b"[]")

    @property
    def last_text(self) -> str:
        """As `Trajectory.last_text`."""
        return Trajectory(self.task, msgspec.json.decode(self.messages, type=list[Message])).last_text


_DECODER = msgspec.json.Decoder(_Line)


def reducer_of(folder: Path) -> Reducer:
    """How an evaluation reduced the samples of a task. Raises ConfigError for settings that cannot be read."""
    settings = read_config(phases_of(folder)[-1])[0]
    return Reducer(settings.get("reduce", "mean"), settings.get("answer_pattern", ""))


def rewards_by_task(folder: Path, reducer: Reducer | None = None) -> dict[str, float]:
    """The reward of each task in a run's last evaluation, sampled and not greedy, by the task's key. Several samples
    are reduced by `reducer`; None: as the evaluation did.

    Empty if the run has saved no evaluation. Raises UserError for a line that cannot be read.
    """
    reducer = reducer_of(folder) if reducer is None else reducer
    found: defaultdict[str, defaultdict[tuple[int, str], list[tuple[int, float, str]]]]
    found = defaultdict(lambda: defaultdict(list))
    for line in _judged_lines(folder):
        text = line.last_text if reducer.how == "majority" else ""
        place = (line.group, line.role)
        found[f"{line.task.env} {line.task.key}"][place].append((line.rollout, line.reward or 0.0, text))
    return {key: statistics.fmean(_reduced(each, reducer) for each in own.values()) for key, own in found.items()}


def _reduced(samples: list[tuple[int, float, str]], reducer: Reducer) -> float:
    _, rewards, texts = zip(*sorted(samples, key=lambda each: each[0]), strict=True)
    return reducer.reduce(rewards, texts)


def _judged_lines(folder: Path) -> Iterator[_Line]:
    """The judged lines of a run's last evaluation. Raises UserError for a line that cannot be read."""
    for path in _evaluated(folder)[-1:]:
        with open_regular(path) as file:
            for row, line in enumerate(file, start=1):
                try:
                    found = _DECODER.decode(line)
                except msgspec.DecodeError as error:
                    raise UserError(f"{path}, line {row} cannot be read: {error}") from error
                if found.temperature and found.reward is not None and found.judged is not False and found.why != OTHERS:
                    yield found


def _evaluated(folder: Path) -> list[Path]:
    """The files of a run's evaluations, the last one last."""
    trajectories = phases_of(folder)[-1] / "trajectories"
    return sorted([*trajectories.glob("eval.jsonl"), *trajectories.glob(f"{EVALUATED}*.jsonl")])


def paired_difference(
    first: Mapping[str, float], second: Mapping[str, float], *, resamples: int = RESAMPLES, seed: int = 0
) -> Paired | None:
    """The mean difference of the tasks that both have, with a bootstrap interval over tasks, which is infinite for
    fewer than TASKS_MIN tasks. None for fewer than two tasks. Raises UserError if numpy is not installed, which the
    light installation does not have.

    A plain percentile interval is too narrow for few tasks. This one has the tails of Hesterberg, "What Teachers Should
    Know About the Bootstrap" (2015), section 4.2: Phi(-sqrt(n / (n - 1)) t(n - 1)) on each side.

    >>> paired_difference({"a": 0.0, "b": 0.0, "c": 1.0}, {"a": 1.0, "b": 1.0, "d": 1.0})
    Paired(difference=1.0, low=-inf, high=inf, tasks=2, left_out=2)
    """
    both = sorted(first.keys() & second.keys())
    if len(both) < 2:
        return None
    try:
        import numpy as np
    except ImportError as error:
        raise UserError("a paired comparison needs numpy; type: pip install numpy") from error
    differences = np.array([second[key] - first[key] for key in both])
    n, rng = len(both), np.random.default_rng(seed)
    left_out = len(first.keys() | second.keys()) - n
    if n < TASKS_MIN:
        return Paired(float(differences.mean()), -math.inf, math.inf, n, left_out)
    means = np.empty(resamples)
    for begin in range(0, resamples, 500):  # in blocks, so that 10,000 tasks take little memory
        block = min(500, resamples - begin)
        means[begin : begin + block] = differences[rng.integers(n, size=(block, n))].mean(axis=1)
    tail = 0.5 * math.erfc(math.sqrt(n / (n - 1)) * t_quantile(n - 1) / math.sqrt(2))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Paired(float(differences.mean()), float(low), float(high), n, left_out)


def interval_of(values: Sequence[float]) -> dict[str, float | None]:
    """The number of the values, their mean and its 95 % t-interval: mean ± t(n - 1) s / sqrt(n), with the sample's
    deviation s (ddof 1). One value has no interval.

    >>> {name: round(value, 3) for name, value in interval_of([1.0, 2.0, 3.0]).items()}
    {'n': 3, 'mean': 2.0, 'low': -0.484, 'high': 4.484}
    """
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return {"n": n, "mean": mean, "low": None, "high": None}
    half = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return {"n": n, "mean": mean, "low": mean - half, "high": mean + half}


def t_quantile(degrees: int, share: float = 0.95) -> float:
    """The t of Student's distribution with |T| <= t in this share of cases (Abramowitz and Stegun 26.7.3, 26.7.4).

    >>> [round(t_quantile(degrees), 3) for degrees in (1, 2, 4, 9, 30)]
    [12.706, 4.303, 2.776, 2.262, 2.042]
    """

    def probability(t: float) -> float:
        angle, odd = math.atan(t / math.sqrt(degrees)), degrees % 2
        sine, cosine = math.sin(angle), math.cos(angle)
        term = total = 1.0 if degrees > 1 else 0.0
        for k in range(2 + odd, degrees - 1, 2):
            term *= (k - 1) / k * cosine**2
            total += term
        return 2 / math.pi * (angle + sine * cosine * total) if odd else sine * total

    low, high = 0.0, 1e3
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < share else (low, middle)
    return high
