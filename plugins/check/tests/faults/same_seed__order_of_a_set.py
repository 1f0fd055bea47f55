"""The tasks follow the order of a set of texts."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    def question(self, first, second):
        return f"What is {first} plus {second}? {' '.join({'Please', 'Answer', 'with', 'one', 'number'})}"
