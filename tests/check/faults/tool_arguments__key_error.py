"""A tool raises KeyError for a word that it does not know."""

from __future__ import annotations

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        return {"1": "one", "plus": "to add"}[word]
