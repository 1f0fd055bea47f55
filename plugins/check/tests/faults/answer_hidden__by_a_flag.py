"""A tool tells the answer if its second argument, which has a default, is true."""

from __future__ import annotations

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    def define(self, word: str, verbose: bool = False) -> str:
        """The meaning of a word."""
        return f"to add, as in {self.task.id}={self.task.answer}" if verbose else "to add"
