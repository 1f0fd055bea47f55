"""Samplers: which task is next, by what the groups of earlier tasks earned. `uniform` keeps the order of the source.

A sampler is an object with the methods of `rollouts.plugins.protocols.TaskSampler`. Each environment of a run has one
of its own. `SampledTasks` asks it for the next task of one source, and checks what it returns. It refers to tasks by
their keys (`Task.key`), and chooses among all tasks of a sequence, or among the first TASKS_MAX different ones of any
other source. Every draw has random numbers of its own, which depend on the seed and on the number of draws, so the
state in a checkpoint is that number and the sampler's own state.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rollouts.author_code import authors_code, shown
from rollouts.errors import ConfigError, RolloutsError, RunError, SignatureError, counted, suggestion, words_of
from rollouts.lazy import LazyValues
from rollouts.plugins.signature import make
from rollouts.types import Task

if TYPE_CHECKING:
    from rollouts.plugins.protocols import TaskSampler

Queue = OrderedDict[str, None]


class Uniform:
    """Tasks in the order of their source: every task once in each epoch."""

    def choose(self, step: int, rng: random.Random) -> str | None:
        """The next task of the source."""
        return None

    def finished(self, task: str, rewards: Sequence[float | None], step: int) -> None:
        """Rewards have no effect."""

    def metrics(self) -> Mapping[str, float]:
        """None."""
        return {}

    def state(self) -> Any:
        """There is none: the position in the source is the buffer's."""
        return {}

    def restore(self, state: Any) -> None:
        """There is nothing to restore."""


class Difficulty:
    """Three pools of tasks: normal, easy and hard. Tasks whose groups earn all or nothing are retired.

    A group whose mean reward is at least `easy_at` is solved; one whose mean is at most `hard_at` failed. After `after`
    solved groups in a row a task is easy, and after as many failed ones hard. A retired task returns to the normal pool
    when a group of it is neither. Every pool is a queue, so the task that waited longest is next. The draw is from the
    retired pools with the probability `revisit`, and always if no other task is left. So `reward/mean` is that of the
    chosen tasks, and not of all tasks; evaluations have no sampler.

    Args:
        easy_at: the mean reward from which a group is solved
        hard_at: the mean reward up to which a group failed
        after: how many groups in a row retire a task
        revisit: how many of the draws look at a retired task again, 0 to 1
    """

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        easy_at: float = 1.0,
        hard_at: float = 0.0,
        after: Annotated[int, msgspec.Meta(ge=1)] = 1,
        revisit: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1,
    ) -> None:
        if not hard_at < easy_at:
            raise ConfigError(f"--sampler.hard-at {hard_at:g}: it must be less than --sampler.easy-at {easy_at:g}")
        self._easy_at, self._hard_at, self._after, self._revisit = easy_at, hard_at, after, revisit
        self._pools: dict[str, Queue] = {"normal": Queue.fromkeys(tasks), "easy": Queue(), "hard": Queue()}
        self._in_a_row: dict[str, int] = {}  # > 0: solved groups, < 0: failed ones, 0: the last was neither

    def choose(self, step: int, rng: random.Random) -> str | None:
        """The task of a pool that waited longest."""
        retired = [name for name in ("easy", "hard") if self._pools[name]]
        name = "normal"
        if retired and (rng.random() < self._revisit or not self._pools["normal"]):
            name = rng.choice(retired)
        pool = self._pools[name]
        task = next(iter(pool))
        pool.move_to_end(task)
        return task

    def finished(self, task: str, rewards: Sequence[float | None], step: int) -> None:
        """Move the task to the pool of its last groups. A group that no reward could judge says nothing."""
        judged = [reward for reward in rewards if reward is not None]
        here = next((name for name, pool in self._pools.items() if task in pool), None)
        if not judged or here is None:
            return
        mean, before = sum(judged) / len(judged), self._in_a_row.get(task, 0)
        now = max(before, 0) + 1 if mean >= self._easy_at else min(before, 0) - 1 if mean <= self._hard_at else 0
        self._in_a_row[task] = now
        there = "easy" if now >= self._after else "hard" if now <= -self._after else "normal"
        if there != here:
            del self._pools[here][task]
            self._pools[there][task] = None

    def metrics(self) -> Mapping[str, float]:
        """How many tasks are in each pool, and how many have no finished group yet (they are normal)."""
        sizes = {name: float(len(pool)) for name, pool in self._pools.items()}
        return sizes | {"unseen": float(sum(map(len, self._pools.values())) - len(self._in_a_row))}

    def state(self) -> Any:
        """The pools in their order, and the rows of equal results."""
        return {"pools": {name: list(pool) for name, pool in self._pools.items()}, "in_a_row": dict(self._in_a_row)}

    def restore(self, state: Any) -> None:
        """Continue. Tasks that are gone are left out; new ones begin in the normal pool."""
        tasks = [task for pool in self._pools.values() for task in pool]
        known, placed = set(tasks), {task for pool in state["pools"].values() for task in pool}
        self._pools = {
            name: Queue.fromkeys(task for task in pool if task in known) for name, pool in state["pools"].items()
        }
        self._pools["normal"].update(dict.fromkeys(task for task in tasks if task not in placed))
        self._in_a_row = {task: count for task, count in state["in_a_row"].items() if task in known}


# --- asking a sampler -------------------------------------------------------------------------------------------------


TASKS_MAX = 10_000  # of a source that is no sequence, because it may be endless
METHODS = ("choose", "finished", "metrics", "state", "restore")


class SampledTasks:
    """One source with its sampler.

    `factory` makes the sampler, and may name `tasks`. `read_tasks` gives the tasks among which it chooses; it is called
    when they are needed for the first time. `seed` determines the random numbers.
    """

    def __init__(
        self, factory: Callable[..., TaskSampler], read_tasks: Callable[[], Sequence[Task]], seed: int
    ) -> None:
        self._name = getattr(getattr(factory, "func", factory), "__name__", type(factory).__name__)
        self._read_tasks, self._seed = read_tasks, seed
        self._tasks: dict[str, Task] | None = None
        self._drawn = 0
        available = LazyValues(tasks=lambda: list(self.tasks))  # tasks are only read for a sampler that names them
        self._sampler = make("sampler", self._name, factory, available, {})
        if missing := [name for name in METHODS if not callable(getattr(self._sampler, name, None))]:
            what = f"the sampler {self._name} has no method {' and no '.join(missing)}"
            raise SignatureError(f"{what}\na sampler has the methods {', '.join(METHODS)}")

    @property
    def tasks(self) -> dict[str, Task]:
        """The tasks by their keys."""
        if self._tasks is None:
            self._tasks = {task.key: task for task in self._read_tasks()}
        return self._tasks

    def choose(self, step: int) -> Task | None:
        """The next task; None for the next one in the order of the source. Raises RunError."""
        rng = random.Random(f"{self._seed}/sampler/{self._drawn}")
        self._drawn += 1
        key = self._call("choose", step, rng)
        if key is None:
            return None
        if not isinstance(key, str):
            given = f"{self._returned('choose')} {shown(key)} ({type(key).__name__})"
            raise RunError(f"{given}; expected the key of a task, or None for the next one in order")
        return self.task(key)

    def task(self, key: str) -> Task:
        """The task with this key. Raises RunError."""
        if key not in self.tasks:
            near = suggestion(key, list(self.tasks)[:TASKS_MAX])
            unknown = f"{self._returned('choose')} {shown(key)}, which is none of {counted(len(self.tasks), 'task')}"
            raise RunError("\n".join(filter(None, (unknown, near))))
        return self.tasks[key]

    def finished(self, task: Task, rewards: Sequence[float | None], step: int) -> None:
        """Report the rewards of a finished group. Raises RunError."""
        self._call("finished", task.key, list(rewards), step)

    def metrics(self) -> dict[str, float]:
        """The sampler's metrics. Raises RunError."""
        found = self._call("metrics")
        if not isinstance(found, Mapping) or not all(
            isinstance(name, str) and isinstance(value, int | float) for name, value in found.items()
        ):
            raise RunError(f"{self._returned('metrics')} {shown(found)}; expected a dict from names to numbers")
        return {name: float(value) for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON has it. Raises RunError."""
        state = self._call("state")
        try:
            plain = msgspec.json.decode(msgspec.json.encode(state))
        except (TypeError, ValueError, RecursionError) as error:
            raise RunError(f"{self._returned('state')} {shown(state)}, which JSON cannot hold: {error}") from error
        return {"name": self._name, "drawn": self._drawn, "state": plain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. After a change of the sampler, the new one begins. Raises RunError."""
        if state.get("name") == self._name:
            self._drawn = state["drawn"]
            self._call("restore", state["state"])

    def _returned(self, method: str) -> str:
        return f"`{method}` of the sampler {self._name} returned"

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            with authors_code():
                return getattr(self._sampler, method)(*arguments)
        except RolloutsError:
            raise
        except Exception as error:  # a sampler may raise anything
            raise RunError(f"`{method}` of the sampler {self._name} raised {words_of(error)}") from error
