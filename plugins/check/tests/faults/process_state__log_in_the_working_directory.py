"""The reward writes into a file that all episodes share."""

from __future__ import annotations

from sums import Sums

from rollouts import reward


class Fault(Sums):
    @reward
    def correct(self, task, trajectory):
        with open(__file__, "r+"):  # nothing is written, so that the test is clean
            pass
        return float(trajectory.last_text.strip() == str(task.answer))
