"""A tool draws from the operating system's random numbers."""

from __future__ import annotations

import uuid

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        return f"ticket {uuid.uuid4()}"
