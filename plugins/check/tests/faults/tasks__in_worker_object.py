"""A task has an object that cannot be sent."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    def tasks(self, split, rng):
        for task in super().tasks(split, rng):
            task.info["rule"] = Sums
            yield task
