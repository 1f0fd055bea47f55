"""An asyncio tool runs a program, and waits for its end in the event loop."""

from __future__ import annotations

import subprocess

from sums import Sums

from rollouts import tool


class Fault(Sums):
    async_library = "asyncio"

    @tool
    async def define(self, word: str) -> str:
        """The meaning of a word."""
        return subprocess.run(["echo", "to add"], capture_output=True, text=True).stdout  # noqa: ASYNC221
