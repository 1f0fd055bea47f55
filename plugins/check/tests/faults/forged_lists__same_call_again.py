"""Each call of the right tool earns again."""

from __future__ import annotations

from sums import Sums

from rollouts import reward


class Fault(Sums):
    reward_range = None

    @reward
    def correct(self, task, trajectory):
        return float(trajectory.last_text.strip() == str(task.answer)) * self.calls
