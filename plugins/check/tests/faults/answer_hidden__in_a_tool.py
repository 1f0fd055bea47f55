"""A tool gives the answer for any word."""

from __future__ import annotations

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        return f"the total is {self.task.answer}"
