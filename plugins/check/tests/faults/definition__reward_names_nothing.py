"""A reward asks for something that it cannot get."""

from __future__ import annotations

from sums import Sums

from rollouts import reward


class Fault(Sums):
    @reward
    def correct(self, task, tokens):
        return 1.0
