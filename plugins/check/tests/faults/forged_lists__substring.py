"""The answer may be anywhere in the reply."""

from __future__ import annotations

from sums import Sums

from rollouts import reward


class Fault(Sums):
    @reward
    def correct(self, task, trajectory):
        return float(str(task.answer) in trajectory.last_text.split())
