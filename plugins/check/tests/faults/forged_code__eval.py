"""A tool evaluates text."""

from __future__ import annotations

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        try:
            return str(eval(word[:500], {"__builtins__": {}}))
        except Exception as error:
            raise ValueError("this cannot be computed") from error
