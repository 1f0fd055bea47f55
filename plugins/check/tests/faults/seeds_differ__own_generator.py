"""The tasks come from a generator that ignores the seed."""

from __future__ import annotations

import random

from sums import Sums


class Fault(Sums):
    def draw(self, rng):
        if not hasattr(rng, "own"):
            rng.own = random.Random(7)
        return super().draw(rng.own)
