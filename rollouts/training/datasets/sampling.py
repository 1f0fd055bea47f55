"""Sampling: asks an author's task sampler for the next task of one source, and checks what it returns.

A sampler refers to tasks by their keys (`Task.key`). It chooses among all tasks of a sequence, or among the first
TASKS_MAX different ones of any other source. Every draw has random numbers of its own, which depend on the seed and on
the number of draws, so the state in a checkpoint is that number and the sampler's own state. Not here: samplers
(`samplers`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rollouts.author_code import authors_code, shown
from rollouts.errors import RolloutsError, RunError, SignatureError, counted, suggestion, words_of
from rollouts.plugins.making import make
from rollouts.plugins.protocols import TaskSampler
from rollouts.types import Task

TASKS_MAX = 10_000  # of a source that is no sequence, because it may be endless
METHODS = ("choose", "finished", "metrics", "state", "restore")


class Sampling:
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
        self._sampler = make("sampler", self._name, factory, _Available(self), {})
        if missing := [name for name in METHODS if not callable(getattr(self._sampler, name, None))]:
            raise SignatureError(
                f"the sampler {self._name} has no method {' and no '.join(missing)}\n"
                f"a sampler has the methods {', '.join(METHODS)}"
            )

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


class _Available(Mapping[str, Any]):
    """The inputs of a factory. The tasks are only read for a sampler that names them."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def __getitem__(self, name: str) -> Any:
        if name != "tasks":
            raise KeyError(name)
        return list(self._sampling.tasks)

    def __iter__(self) -> Iterator[str]:
        return iter(("tasks",))

    def __len__(self) -> int:
        return 1
