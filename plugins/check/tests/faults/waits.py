"""Tools that wait without blocking the event loop, and one that computes: an environment without a mistake."""

from __future__ import annotations

import asyncio
import subprocess
import time

import trio
from sums import Sums

from rollouts import tool


class Waits(Sums):
    @tool
    def sleep(self) -> str:
        """Sleep. A method without `async` has a thread of its own."""
        time.sleep(0.06)
        return "slept"

    @tool
    async def sleep_in_a_thread(self) -> str:
        """Sleep in a thread."""
        await trio.to_thread.run_sync(time.sleep, 0.06)
        return "slept"

    @tool
    async def run(self) -> str:
        """Run a program under trio, and start one that a thread waits for."""
        await trio.run_process(["sleep", "0.06"])
        await trio.to_thread.run_sync(subprocess.Popen(["sleep", "0.06"]).wait)  # noqa: ASYNC220
        return "run"

    @tool
    async def run_under_asyncio(self) -> str:
        """Run a program under asyncio."""
        process = await asyncio.create_subprocess_exec("sleep", "0.06")
        return str(await process.wait())

    @tool
    async def compute(self) -> str:
        """Compute for a while."""
        until = time.thread_time() + 0.15
        while time.thread_time() < until:
            sum(range(1000))
        return "computed"
