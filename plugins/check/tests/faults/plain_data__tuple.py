"""The answer is a tuple, which comes back from JSON as a list."""

from __future__ import annotations

from sums import Sums

from rollouts import Task


class Fault(Sums):
    def tasks(self, split, rng):
        for task in super().tasks(split, rng):
            yield Task(task.prompt, task.answer, {"both": (1, 2)}, task.id)
