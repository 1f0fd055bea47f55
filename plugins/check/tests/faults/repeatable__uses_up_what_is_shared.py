"""An episode takes the answer out of what all episodes share, so that an expert earns the reward once."""

from __future__ import annotations

from sums import Sums

from rollouts import reward


class Fault(Sums):
    def shared(self):
        return {str(number) for number in range(1000)}

    def setup(self, task, shared):
        super().setup(task)
        self.left = shared

    @reward
    def correct(self, task, trajectory):
        return float(trajectory.last_text.strip() == str(task.answer) and str(task.answer) in self.left)

    def close(self):
        super().close()
        if self.task is not None and self.calls == 1:  # the expert's call
            self.left.discard(str(self.task.answer))
