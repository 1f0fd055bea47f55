"""A metric writes into the task."""

from __future__ import annotations

from sums import Sums

from rollouts import metric


class Fault(Sums):
    def tasks(self, split, rng):
        for task in super().tasks(split, rng):
            task.info["replies"] = 0
            yield task

    @metric
    def replies(self, task, trajectory):
        task.info["replies"] += trajectory.turns
        return trajectory.turns
