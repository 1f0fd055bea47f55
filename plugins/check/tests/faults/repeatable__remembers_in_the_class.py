"""The class remembers the solved tasks, so that an idle agent earns the reward afterwards."""

from __future__ import annotations

from sums import Sums

from rollouts import reward


class Fault(Sums):
    solved: set[str] = set()  # noqa: RUF012

    @reward
    def correct(self, task, trajectory):
        if trajectory.last_text.strip() == str(task.answer):
            self.solved.add(task.id)
        return float(task.id in self.solved)
