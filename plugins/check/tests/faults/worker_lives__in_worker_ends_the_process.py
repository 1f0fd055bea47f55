"""A tool ends the worker's process if it is cancelled."""

from __future__ import annotations

import os
import sys

import trio
from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    async def add(self, first: int, second: int) -> int:
        """Add two numbers."""
        self.calls += 1
        try:
            await trio.sleep(0.2)
        except trio.Cancelled:
            if "pytest" not in sys.modules:  # the worker
                os._exit(3)
            raise
        return first + second
