"""An async `reply` waits for another thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import sleep

from sums import Sums


class Fault(Sums):
    async def reply(self, trajectory):
        with ThreadPoolExecutor() as pool:
            return pool.submit(sleep, 0.15).result()
