"""The prompt is empty."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    def question(self, first, second):
        return " "
