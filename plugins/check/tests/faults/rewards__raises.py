"""The reward raises for a reply that is no number."""

from __future__ import annotations

from sums import Sums

from rollouts import reward


class Fault(Sums):
    @reward
    def correct(self, task, trajectory):
        return float(int(trajectory.last_text) == task.answer)
