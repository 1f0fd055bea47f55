"""The id has only one of the numbers."""

from __future__ import annotations

from sums import Sums

from rollouts import Task


class Fault(Sums):
    def tasks(self, split, rng):
        for task in super().tasks(split, rng):
            yield Task(task.prompt, task.answer, id=task.id.partition("+")[0])
