"""The class keeps what it made for the first task of the process, and uses it for all others."""

from __future__ import annotations

from sums import Sums

from rollouts import tool


class Fault(Sums):
    index = None

    def setup(self, task):
        super().setup(task)
        if Fault.index is None:
            Fault.index = f"an index of {task.id}"

    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        return f"{word} is not in {self.index}"
