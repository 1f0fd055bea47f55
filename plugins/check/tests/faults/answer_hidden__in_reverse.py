"""The number of the question is the answer in reverse, behind words that change."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    def question(self, first, second):
        code = str(first + second)[::-1]
        return f"Add {first} and {second} ({'page' if first % 2 else 'sheet'} {code})."
