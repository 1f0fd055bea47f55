"""An async tool sleeps with `time.sleep`."""

from __future__ import annotations

import time

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    async def define(self, word: str) -> str:
        """The meaning of a word."""
        time.sleep(0.001)  # noqa: ASYNC251
        return "to add"
