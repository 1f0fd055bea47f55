"""One of the formats of a tool begins with the answer."""

from __future__ import annotations

from typing import Literal

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    def define(self, word: str, style: Literal["short", "long", "full"] = "short") -> str:
        """The meaning of a word."""
        return f"{self.task.answer} is the sum of {self.task.id}" if style == "full" else f"{style}: to add"
