"""A tool answers according to the weekday."""

from __future__ import annotations

from datetime import datetime

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        return f"to add, on {datetime.now():%A}"
