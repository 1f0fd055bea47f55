"""The prompt shows the answer."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    def question(self, first, second):
        return f"What is {first} plus {second}? (result: {first + second})"
