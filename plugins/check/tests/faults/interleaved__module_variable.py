"""The answer is in a module variable, so the last episode overwrites it."""

from __future__ import annotations

from sums import Sums

from rollouts import reward

current = {}


class Fault(Sums):
    def setup(self, task):
        super().setup(task)
        current["answer"] = task.answer

    @reward
    def correct(self, trajectory):
        return float(trajectory.last_text.strip() == str(current["answer"]))
