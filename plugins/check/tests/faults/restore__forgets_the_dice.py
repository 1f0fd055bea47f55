"""The generator of the dice is not part of the state."""

from __future__ import annotations

from random import Random

from sums import Sums

from rollouts import tool


class Fault(Sums):
    def setup(self, task):
        super().setup(task)
        self.dice = Random(task.id)

    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        return f"{self.dice.random()}"
