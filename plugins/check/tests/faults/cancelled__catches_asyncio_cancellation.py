"""An asyncio tool tries again after any exception, its cancellation included."""

from __future__ import annotations

import asyncio

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    async def define(self, word: str) -> str:
        """The meaning of a word."""
        for _ in range(3):
            try:
                await asyncio.sleep(0.1)
                return "to add"
            except BaseException:
                continue
        return "unknown"
