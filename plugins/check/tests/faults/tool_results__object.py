"""A tool returns an object that JSON cannot hold."""

from __future__ import annotations

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    def define(self, word: str) -> object:
        """The meaning of a word."""
        return object()
