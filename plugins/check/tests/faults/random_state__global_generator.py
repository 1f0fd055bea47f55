"""A tool draws from the global generator."""

from __future__ import annotations

import random

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    def add(self, first: int, second: int) -> int:
        """Add two numbers."""
        random.random()
        return first + second
