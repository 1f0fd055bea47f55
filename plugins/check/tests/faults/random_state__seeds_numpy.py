"""`setup` seeds the global generator of numpy."""

from __future__ import annotations

import numpy
from sums import Sums


class Fault(Sums):
    def setup(self, task):
        numpy.random.seed(0)
        super().setup(task)
