"""The environment chooses its words with the hash of a text, which differs between processes."""

from __future__ import annotations

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        return f"word number {hash(word) % 1000}"
