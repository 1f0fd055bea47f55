"""`setup` changes the task."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    def tasks(self, split, rng):
        for task in super().tasks(split, rng):
            task.info["tries"] = 3
            yield task

    def setup(self, task):
        super().setup(task)
        task.info["tries"] -= 1
