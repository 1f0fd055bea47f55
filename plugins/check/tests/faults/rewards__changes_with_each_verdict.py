"""Judging changes the episode, so the second verdict differs."""

from __future__ import annotations

from sums import Sums

from rollouts import reward


class Fault(Sums):
    @reward
    def correct(self, task, trajectory):
        self.verdicts = getattr(self, "verdicts", 0) + 1
        return float(trajectory.last_text.strip() == str(task.answer)) / self.verdicts
