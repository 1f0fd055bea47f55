"""Demonstrations use an attribute that does not exist."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    def demonstrations(self, split, rng):
        yield from self.experts
