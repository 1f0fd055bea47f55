"""The reward is NaN for an empty reply."""

from __future__ import annotations

import math

from sums import Sums

from rollouts import reward


class Fault(Sums):
    @reward
    def correct(self, task, trajectory):
        text = trajectory.last_text.strip()
        return float(text == str(task.answer)) if text else math.nan
