"""A tool shows what is left of 5000 after the answer."""

from __future__ import annotations

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    def rest(self) -> str:
        """What is left."""
        return f"{5000 - self.task.answer} of {self.task.id}"
