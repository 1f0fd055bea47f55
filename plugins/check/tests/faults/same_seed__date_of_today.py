"""The tasks depend on the date."""

from __future__ import annotations

from datetime import date

from sums import Sums


class Fault(Sums):
    def draw(self, rng):
        first, second = super().draw(rng)
        return first + date.today().toordinal() % 7, second
