"""All tasks have the same mapping, which is changed for each."""

from __future__ import annotations

from sums import Sums

from rollouts import Task


class Fault(Sums):
    def tasks(self, split, rng):
        info = {}
        for task in super().tasks(split, rng):
            info["question"] = task.id
            yield Task(task.prompt, answer=task.answer, info=info, id=task.id)
