"""Samplers: which task is next, by what the groups of earlier tasks earned. `uniform` keeps the order of the source.

A sampler is an object with the methods of `rollouts.plugins.protocols.TaskSampler`. Each environment of a run has one
of its own. Not here: the checks of what it returns, and its state in a checkpoint (`sampling`).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from rollouts.errors import ConfigError

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
