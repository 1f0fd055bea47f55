"""A slow answer earns less."""

from __future__ import annotations

import time

from sums import Sums

from rollouts import reward


class Fault(Sums):
    def setup(self, task):
        super().setup(task)
        self.began = time.monotonic()

    @reward
    def correct(self, task, trajectory):
        is_right = trajectory.last_text.strip() == str(task.answer)
        return is_right / (1 + 0.001 * (time.monotonic() - self.began))
