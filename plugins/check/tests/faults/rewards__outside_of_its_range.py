"""The reward leaves the declared range."""

from __future__ import annotations

from sums import Sums

from rollouts import reward


class Fault(Sums):
    @reward
    def correct(self, task, trajectory):
        return 1.0 if trajectory.last_text.strip() == str(task.answer) else -0.5
