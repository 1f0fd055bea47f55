"""The number of the question is the answer and 1000."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    def question(self, first, second):
        return f"Question {first + second + 1000}: what is {first} plus {second}?"
