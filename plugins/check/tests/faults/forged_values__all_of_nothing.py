"""An empty list has no wrong number."""

from __future__ import annotations

import json

from sums import Sums

from rollouts import reward


class Fault(Sums):
    @reward
    def correct(self, task, trajectory):
        try:
            given = json.loads(trajectory.last_text)
        except ValueError:
            return 0.0
        numbers = given if isinstance(given, list) else [given]
        return float(all(one == other for one, other in zip(numbers, [task.answer])))  # noqa: B905
