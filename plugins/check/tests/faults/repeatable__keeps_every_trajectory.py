"""A reward keeps each trajectory in the class."""

from __future__ import annotations

from sums import Sums

from rollouts import reward


class Fault(Sums):
    seen = []  # noqa: RUF012

    @reward
    def correct(self, task, trajectory):
        self.seen.append(trajectory)
        return float(trajectory.last_text.strip() == str(task.answer))
