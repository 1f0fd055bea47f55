"""The information of a task has a tuple, which a worker sends as a list."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    def tasks(self, split, rng):
        for task in super().tasks(split, rng):
            task.info["range"] = (0, 10)
            yield task
