"""The ids count the tasks of each split, so that a training task has the id of a held-out one."""

from __future__ import annotations

from itertools import count

from sums import Sums

from rollouts import Task


class Fault(Sums):
    def tasks(self, split, rng):
        for number in count():
            first, second = self.draw(rng)
            yield Task(self.question(first, second), answer=first + second, id=f"task {number}")
