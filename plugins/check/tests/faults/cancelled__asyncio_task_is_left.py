"""`setup` starts an asyncio task that `close` does not end."""

from __future__ import annotations

import asyncio

from sums import Sums


class Fault(Sums):
    async_library = "asyncio"

    async def setup(self, task):
        super().setup(task)
        self.beat = asyncio.create_task(self.beats())

    async def beats(self):
        for _ in range(400):
            await asyncio.sleep(0.05)
