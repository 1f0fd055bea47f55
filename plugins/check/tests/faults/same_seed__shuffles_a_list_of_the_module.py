"""`tasks` shuffles a list of the module in place, so that the next call begins with another order."""

from __future__ import annotations

from sums import Sums

NUMBERS = list(range(100))


class Fault(Sums):
    def draw(self, rng):
        rng.shuffle(NUMBERS)
        return NUMBERS[0], NUMBERS[1]
