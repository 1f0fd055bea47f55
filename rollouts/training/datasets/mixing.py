"""MixedBuffer: mixes tasks of several sources by shares, which may change with the step.

The source of the next task only depends on the seed and on the number of tasks before it. It is not random: draw number
n is the point `start + n * golden ratio` on the circle [0, 1). Each source has an arc of the length of its share, and
the seed determines the start. These points are spread evenly, so every single step has the right shares, up to a task
or two. (With random draws, two equal sources would give 4 and 4 of 8 tasks in one step of four.) The number n is the
only state.

Not here: sources (`buffer`), and which environment plays a task (`rollouts.runs.environments`).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.author_code import authors_code, shown
from rollouts.errors import ConfigError, said_of, words_of
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.types import Task

if TYPE_CHECKING:
    from rollouts.plugins.protocols import TaskSampler

Weight = float | Callable[[int], float]
"""The weight of a source: a number, or a function of the training step (0-based). Only ratios of weights count."""

_GOLDEN = 0x9E3779B97F4A7C15  # the fraction of the golden ratio, in units of 2**-64
_CIRCLE = 2**64


class Source(NamedTuple):
    """One source of a mixture. `prompts`, `exclude` and `sampler` are as for DataBuffer."""

    name: str
    prompts: Sequence[Any] | Callable[[int], Iterable[Any]]
    weight: Weight = 1.0
    exclude: frozenset[str] = frozenset()
    sampler: Callable[..., TaskSampler] | None = None


class MixedBuffer(DataBuffer):
    """A DataBuffer over several sources. Each source has its own epochs and is shuffled separately.

    `sample_offset` counts all drawn tasks. `epoch_id` is the smallest epoch of the sources that were used.

    Args:
        sources: with different names. Weights must be >= 0 and not all 0, at every step.
        seed: determines the order of sources, and of the tasks of a sequence.
        shuffle: False visits sequences in their own order.
        tasks_per_step: if `get_prompts` gets no step, the step is the number of tasks so far divided by this, rounded
            down.

    >>> buffer = MixedBuffer([Source("easy", ["a", "b"], 3), Source("hard", ["z"], 1)], shuffle=False)
    >>> [task.prompt for task in buffer.get_prompts(8)].count("z"), buffer.epochs
    (2, {'easy': 2, 'hard': 1})
    """

    def __init__(
        self, sources: Sequence[Source], *, seed: int = 0, shuffle: bool = True, tasks_per_step: int = 1
    ) -> None:
        super().__init__((), seed=seed)
        assert tasks_per_step > 0, tasks_per_step
        names = [source.name for source in sources]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a mixture needs sources with different names; got {', '.join(names) or 'none'}")
        self._weights = {source.name: source.weight for source in sources}
        self._tasks_per_step = tasks_per_step
        self._drawn = dict.fromkeys(names, 0)
        self._parts: dict[str, DataBuffer] = {}
        for name, prompts, _, exclude, sampler in sources:
            own_seed = _number(f"{seed}/{name}")
            self._parts[name] = DataBuffer(prompts, seed=own_seed, shuffle=shuffle, exclude=exclude, sampler=sampler)
        shares_at(self._weights, 0)

    @property
    def epochs(self) -> dict[str, int]:
        """The number of complete epochs of each source."""
        return {name: part.epoch_id for name, part in self._parts.items()}

    @property
    def drawn(self) -> dict[str, int]:
        """The number of tasks from each source."""
        return dict(self._drawn)

    def draw(self, step: int | None = None) -> tuple[Task, dict[str, Any]]:
        """The next task, by the weights at training step `step`, and its place.

        Raises:
            ConfigError: a weight is negative or not finite, or all of them are 0.
            EnvironmentDefinitionError: all tasks of a source's epoch are excluded.
            RunError: a sampler raised, or returned no task.
        """
        before = self._position()
        name = self._source_at(step)
        with said_of(name):
            task, place = self._parts[name].draw(step)
        self._count(name)
        return task, before | {"source": name} | ({"task": place["task"]} if "task" in place else {})

    def finished(self, place: Mapping[str, Any], task: Task, rewards: Sequence[float | None], step: int) -> None:
        """Report to the sampler of the task's source what a group earned. Raises RunError."""
        if (part := self._parts.get(place.get("source", ""))) is not None:
            part.finished(place, task, rewards, step)

    @property
    def sampler_metrics(self) -> dict[str, float]:
        """The metrics of each source's sampler, as `env/<source>/tasks/<name>`. Raises RunError."""
        found = {name: part.sampler_metrics for name, part in self._parts.items()}
        return {f"env/{name}/{metric}": value for name, own in found.items() for metric, value in own.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of the mixture and of each of its sources, with their samplers."""
        parts = {name: part.state_dict() | {"drawn": self._drawn[name]} for name, part in self._parts.items()}
        return self._position() | {"sources": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Weights may have changed. Raises ConfigError for another seed, and for other
        sources, because their positions are unknown.
        """
        self._go_to(state)
        for name, part in self._parts.items():
            part.load_state_dict(state["sources"][name])

    def _source_at(self, step: int | None) -> str:
        """The source of the next draw."""
        at = self.sample_offset // self._tasks_per_step if step is None else step
        return list(self._parts)[pick(shares_at(self._weights, at), self.seed, self.sample_offset)]

    def _count(self, name: str) -> None:
        """Count a draw from this source."""
        self._drawn[name] += 1
        self.sample_offset += 1
        self.epoch_id = min(part.epoch_id for each, part in self._parts.items() if self._drawn[each])

    def _position(self) -> dict[str, Any]:
        parts = {name: part._position() | {"drawn": self._drawn[name]} for name, part in self._parts.items()}
        return {"seed": self.seed, "drawn": self.sample_offset, "sources": parts}

    def _go_to(self, position: Mapping[str, Any]) -> None:
        self._check_seed(position)
        there = position.get("sources") or {}
        if set(there) != set(self._parts):
            came = f"the tasks came from {_listed(there)}, and now they come from {_listed(self._parts)}"
            again = "name the same ones again (one that is no longer wanted can have the weight 0)"
            raise ConfigError(f"{came}; {again}, or begin a new run")
        for name, part in self._parts.items():
            part._go_to(there[name])
            self._drawn[name] = there[name]["drawn"]
        self.sample_offset = position["drawn"]
        self.epoch_id = min((part.epoch_id for name, part in self._parts.items() if self._drawn[name]), default=0)

    def _task_at(self, place: Mapping[str, Any], step: int) -> Task:
        if "task" in place:
            return self._parts[place["source"]]._chosen_before(place["task"])
        if self._position() != {name: place[name] for name in ("seed", "drawn", "sources")}:
            self._go_to(place)
        name = self._source_at(step)
        task = self._parts[name]._next_task()
        self._count(name)
        return task


def shares_at(weights: Mapping[str, Weight], step: int) -> list[float]:
    """The shares of the sources at a step; they add up to 1. Raises ConfigError, which names the source, for a bad
    weight.

    >>> shares_at({"easy": 3, "hard": lambda step: step / 100}, 100)
    [0.75, 0.25]
    """
    values = {name: _weight_at(name, weight, step) for name, weight in weights.items()}
    total = math.fsum(values.values())
    if not total > 0:
        zero = f"the weights of {_listed(values)} are all 0 at step {step}, so no task can be drawn"
        raise ConfigError(f"{zero}; give one of them more than 0")
    return [value / total for value in values.values()]


def _weight_at(name: str, weight: Weight, step: int) -> float:
    what = f"the weight of {name} at step {step}"
    try:
        with authors_code():
            value: Any = weight(step) if callable(weight) else weight
    except Exception as error:  # a curriculum may raise anything
        raise ConfigError(f"{what}: its curriculum raised {words_of(error)}") from error
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1e308:
        raise ConfigError(f"{what} is {shown(value)}; expected a number of 0 or more")
    return float(value)


def mean_shares(weights: Mapping[str, Weight], steps: int) -> list[float]:
    """The mean share of each source over the steps of a run. Raises ConfigError like `shares_at`, for any step."""
    count = max(1, steps) if any(callable(weight) for weight in weights.values()) else 1
    rows = [shares_at(weights, step) for step in range(count)]
    return [math.fsum(column) / count for column in zip(*rows, strict=True)]


def pick(shares: Sequence[float], seed: int, number: int) -> int:
    """The index of the source of draw `number` (0-based). Depends on its arguments only.

    >>> [pick([0.5, 0.25, 0.25], 0, number) for number in range(8)]
    [1, 0, 2, 0, 0, 1, 0, 2]
    """
    # Integers are exact, however long the run is. Their first 53 bits make a float below 1.
    place = ((_number(f"{seed}/mixture") + number * _GOLDEN) % _CIRCLE >> 11) / 2**53
    end, chosen = 0.0, 0
    for index, share in enumerate(shares):
        if share > 0:
            chosen, end = index, end + share
            if place < end:
                break
    return chosen


def share_out(count: int, shares: Sequence[float]) -> list[int]:
    """Split `count` by shares into whole numbers, as close to the shares as possible. Each share above 0 gets at least
    1, if `count` is large enough. Without shares, nothing is split.

    >>> share_out(10, [0.5, 0.33, 0.17]), share_out(3, [0.98, 0.01, 0.01]), share_out(4, [1.0, 0.0]), share_out(4, [])
    ([5, 3, 2], [1, 1, 1], [4, 0], [])
    """
    wanted = [index for index, share in enumerate(shares) if share > 0]
    given = [1 if index in wanted and count >= len(wanted) else 0 for index in range(len(shares))]
    while wanted and sum(given) < count:
        most = max(wanted, key=lambda index: (count * shares[index] - given[index], -index))
        given[most] += 1
    return given


def piecewise(points: Sequence[Sequence[float]]) -> Callable[[int], float]:
    """A curriculum through points (step, weight): linear between them, constant before the first and after the last.

    >>> [piecewise([(0, 0.0), (100, 1.0)])(step) for step in (0, 25, 100, 500)]
    [0.0, 0.25, 1.0, 1.0]
    """

    def weight(step: int) -> float:
        for (begin, low), (end, high) in itertools.pairwise(points):
            if begin <= step < end:
                return low + (high - low) * (step - begin) / (end - begin)
        return float(points[0][1] if step < points[0][0] else points[-1][1])

    return weight


def _listed(names: Iterable[str]) -> str:
    return " and ".join(names) or "one source"


def _number(text: str) -> int:
    """64 bits from a text, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
