"""A metric divides by the number of calls."""

from __future__ import annotations

from sums import Sums

from rollouts import metric


class Fault(Sums):
    @metric
    def share(self):
        return 1 / self.calls
