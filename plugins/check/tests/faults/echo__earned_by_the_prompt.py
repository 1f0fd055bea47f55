"""The reward counts words of the question."""

from __future__ import annotations

from sums import Sums

from rollouts import reward


class Fault(Sums):
    @reward
    def correct(self, task, trajectory):
        text = trajectory.last_text.strip()
        return float(text == str(task.answer) or text.startswith("What is"))
