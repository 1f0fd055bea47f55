"""Episodes count in the class, and the model sees the count."""

from __future__ import annotations

from sums import Sums

from rollouts import tool


class Fault(Sums):
    played = 0

    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        type(self).played += 1
        return f"asked {type(self).played} times"
