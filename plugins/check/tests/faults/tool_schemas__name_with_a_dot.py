"""The name of a tool has a dot."""

from __future__ import annotations

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool(name="words.define")
    def define(self, word: str) -> str:
        """The meaning of a word."""
        raise ValueError("only the word plus is known")
