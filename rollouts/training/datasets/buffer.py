"""DataBuffer: yields the next task.

Its only state is its position: `epoch_id`, and `sample_offset` (tasks taken in this epoch, skipped ones included). A
sequence is shuffled again in each epoch, by the seed. Any other source is a function of the epoch; it is read forward,
and read again up to the position on resume. A sampler may choose other tasks than the next one in this order; its state
is then part of the buffer's. Not here: several sources, and curricula (`mixing`), and samplers (`samplers`).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollouts.author_code import why_no_list
from rollouts.env.methods import as_task
from rollouts.errors import ConfigError, EnvironmentDefinitionError, counted
from rollouts.training.datasets.samplers import TASKS_MAX, SampledTasks, Uniform
from rollouts.types import Task

if TYPE_CHECKING:
    from rollouts.plugins.protocols import TaskSampler

HELD_OUT_PART = 5  # if tasks are finite and ignore the split, at most a fifth of them is held out
SKIPPED_MAX = 10_000  # after this many excluded tasks in a row, a source counts as empty
SHUFFLE_WINDOW = 1000  # how many values of an iterator are in memory while it is shuffled
_END = object()  # not None: a source that yields None has an error, and is not at its end


def draw_tasks(source: Iterable[Any], count: int, *, exclude: frozenset[str] = frozenset()) -> list[Task]:
    """The first `count` tasks with different keys, none of them in `exclude`; fewer if the source ends or repeats
    itself.
    """
    assert count >= 0, count
    drawn: dict[str, Task] = {}
    repeated = 0
    for value in source if count else ():
        task = as_task(value)
        is_new = task.key not in drawn and task.key not in exclude
        repeated = 0 if is_new else repeated + 1
        if is_new:
            drawn[task.key] = task
        if len(drawn) >= count or repeated >= SKIPPED_MAX:
            break
    return list(drawn.values())


def shuffled(values: Iterable[Any], rng: random.Random, window: int = SHUFFLE_WINDOW) -> Iterator[Any]:
    """Shuffle an iterable, which may be endless. At most `window` values are in memory.

    Up to `window` values are shuffled evenly. In a longer iterable, a value moves forward by at most `window` places;
    there is no limit on how late it may come.

    >>> list(shuffled("abcdef", random.Random(0), window=3))
    ['b', 'd', 'a', 'f', 'c', 'e']
    """
    source = iter(values)
    held = list(itertools.islice(source, window))
    for value in source:
        place = rng.randrange(len(held))
        yield held[place]
        held[place] = value
    rng.shuffle(held)
    yield from held


@dataclasses.dataclass(eq=False, repr=False)
class DataBuffer:
    """Yields tasks, epoch after epoch.

    Args:
        prompts: a sequence of tasks or prompts; or a function of the epoch (0, 1, …) that returns an iterable of them.
        seed: determines the order in which a sequence is visited.
        shuffle: False visits a sequence in its own order.
        exclude: keys (`Task.key`) of tasks that are never returned: the held-out tasks.
        sampler: makes the sampler, such as `samplers.Difficulty`; None: tasks come in order.

    >>> buffer = DataBuffer(["a", "b", "c"], shuffle=False)
    >>> [task.prompt for task in buffer.get_prompts(4)], buffer.epoch_id
    (['a', 'b', 'c', 'a'], 1)
    """

    prompts: Sequence[Any] | Callable[[int], Iterable[Any]]
    _: dataclasses.KW_ONLY
    seed: int = 0
    shuffle: bool = True
    exclude: frozenset[str] = frozenset()
    sampler: Callable[..., TaskSampler] | None = None

    def __post_init__(self) -> None:
        if not callable(self.prompts) and (reason := why_no_list(self.prompts)):
            expected = "a list of tasks or prompts, or a function of the epoch that returns one"
            given = f"DataBuffer: the prompts are a {type(self.prompts).__name__}, {reason}"
            raise ConfigError(f"{given}; expected {expected}")
        self.epoch_id = self.sample_offset = 0
        self._iterator: Iterator[Any] | None = None
        self._sampling = None if self.sampler is None else SampledTasks(self.sampler, self._read_tasks, self.seed)

    @property
    def epochs(self) -> dict[str, int]:
        """The number of complete epochs of each source; empty if there is only one."""
        return {}

    def get_prompts(self, count: int, *, step: int | None = None) -> list[Task]:
        """The next `count` tasks. A mixture and a sampler may depend on `step`.

        Raises:
            EnvironmentDefinitionError: all tasks of an epoch are excluded.
            RunError: the sampler raised, or returned no task.
        """
        assert count > 0, count
        return [self.draw(step)[0] for _ in range(count)]

    def draw(self, step: int | None = None) -> tuple[Task, dict[str, Any]]:
        """The next task and its place, as plain data: `tasks_at` returns the same task for it. Raises like
        `get_prompts`.
        """
        place = self._position()
        task = None if self._sampling is None else self._sampling.choose(step or 0)
        if task is None:
            return self._next_task(), place
        return task, place | {"task": task.key}

    def tasks_at(self, places: Sequence[tuple[Mapping[str, Any], int]]) -> list[Task]:
        """The tasks that were drawn at these places, each with the step of its draw. This changes nothing."""
        here = self._position()
        tasks = [self._task_at(place, step) for place, step in places]
        if self._position() != here:
            self._go_to(here)
        return tasks

    def finished(self, place: Mapping[str, Any], task: Task, rewards: Sequence[float | None], step: int) -> None:
        """Report to the sampler what the group of a task that was drawn at `place` earned. Raises RunError."""
        if self._sampling is not None:
            self._sampling.finished(task, rewards, step)

    @property
    def sampler_metrics(self) -> dict[str, float]:
        """The sampler's metrics, as `tasks/<name>`; empty without one. Raises RunError."""
        found = {} if self._sampling is None else self._sampling.metrics()
        return {f"tasks/{name}": value for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """The buffer's position, and the state of its sampler."""
        return self._position() | ({} if self._sampling is None else {"sampler": self._sampling.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. The source must be the same as when it was saved.

        Raises ConfigError for another seed, because with another order some tasks would come twice and some never, and
        for a state of several sources.
        """
        self._go_to(state)
        if self._sampling is not None and "sampler" in state:
            self._sampling.load_state_dict(state["sampler"])

    def _position(self) -> dict[str, Any]:
        """The position in the order of the source, without the sampler."""
        return {"epoch_id": self.epoch_id, "sample_offset": self.sample_offset, "seed": self.seed}

    def _go_to(self, position: Mapping[str, Any]) -> None:
        """Continue from a position. Raises like `load_state_dict`."""
        self._check_seed(position)
        if "epoch_id" not in position:
            came = f"the tasks came from {' and '.join(position['sources'])}, and now they come from one source"
            raise ConfigError(f"{came}; name the same ones again, or begin a new run")
        self.epoch_id, self.sample_offset = position["epoch_id"], position["sample_offset"]
        self._iterator = None

    def _task_at(self, place: Mapping[str, Any], step: int) -> Task:
        """The task at a place. Moves the position, unless a sampler chose the task."""
        if "task" in place:
            return self._chosen_before(place["task"])
        if self._position() != place:
            self._go_to(place)
        return self._next_task()

    def _chosen_before(self, key: str) -> Task:
        """The task that a sampler chose; this run may have no sampler any more."""
        return (self._sampling or SampledTasks(Uniform, self._read_tasks, self.seed)).task(key)

    def _read_tasks(self) -> list[Task]:
        """The tasks among which a sampler chooses, in the order of the first epoch."""
        if callable(self.prompts):
            return draw_tasks(self.prompts(0), TASKS_MAX, exclude=self.exclude)
        tasks = (as_task(self.prompts[index]) for index in self._order(0))
        return [task for task in tasks if task.key not in self.exclude]

    def _order(self, epoch: int) -> list[int]:
        """The order in which an epoch visits a sequence."""
        order = list(range(len(self.prompts)))  # type: ignore[arg-type]  # a function has no order
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def _check_seed(self, state: Mapping[str, Any]) -> None:
        if state["seed"] != self.seed:
            anew = f"the seed was {state['seed']} and is {self.seed} now, which would order the tasks anew"
            raise ConfigError(f"{anew}; give seed {state['seed']} again, or begin a new run")

    def _open(self) -> Iterator[Any]:
        """The tasks of the current epoch, from `sample_offset` on."""
        if callable(self.prompts):
            return itertools.islice(iter(self.prompts(self.epoch_id)), self.sample_offset, None)
        sequence = self.prompts
        return (sequence[index] for index in self._order(self.epoch_id)[self.sample_offset :])

    def _next_task(self) -> Task:
        skipped = ends = 0
        seen: set[str] = set()
        while skipped < SKIPPED_MAX and ends < 3:
            if self._iterator is None:
                self._iterator = self._open()
            value = next(self._iterator, _END)
            if value is _END:
                ends += 1
                self.epoch_id, self.sample_offset, self._iterator = self.epoch_id + 1, 0, None
                continue
            self.sample_offset += 1
            task = as_task(value)
            if task.key not in self.exclude:
                return task
            skipped += 1
            seen.add(task.key)
        given = "gave nothing; yield tasks for the split 'train' too"
        if skipped:
            fewer = 0 if len(seen) == 1 else max(1, len(seen) // HELD_OUT_PART)
            given = f"gave only held-out tasks: {skipped} in a row, with {counted(len(seen), 'different task')}"
            given += f"\nyield more different tasks, or hold out fewer: --eval-tasks {fewer}; or let tasks(split, rng) "
            given += "look at `split`, and yield other tasks for 'train' than for 'eval'"
        raise EnvironmentDefinitionError(f"the environment has no training task: tasks('train', rng) {given}")
