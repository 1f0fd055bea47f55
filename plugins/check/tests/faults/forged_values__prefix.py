"""The beginning of the answer is enough."""

from __future__ import annotations

from sums import Sums

from rollouts import reward


class Fault(Sums):
    digits: int = 4

    @reward
    def correct(self, task, trajectory):
        said = trajectory.last_text.strip()
        return float(bool(said) and str(task.answer).startswith(said))
