"""Steps that are played before they are asked for, so that sampling and training go on at the same time.

`count` is how far ahead: while step s is trained on, the steps up to s + count may be played. None of them is begun
earlier, so what a step trains on was begun at most `count` steps before. Left out: how a step is played (`manager`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

__all__ = ["Ahead"]

Step = TypeVar("Step")


class Ahead(Generic[Step]):
    """`run` plays in a task of its own, one step after another; `take` gives them out in that order."""

    def __init__(self, play: Callable[[], Awaitable[Step]], count: int) -> None:
        assert count > 0, count
        self.ready: deque[Step] = deque()
        self._play = play
        self._count = count
        self._asked = self._begun = 0
        self._end: float = math.inf  # steps that will ever be asked for
        self._moved = trio.Event()

    async def run(self) -> None:
        """Until it is cancelled. What `play` raises is raised."""
        while True:
            while self._asked == 0 or self._begun >= min(self._asked + self._count, self._end):
                await self._moved.wait()
            self._begun += 1
            self.ready.append(await self._play())
            self._tell()

    async def take(self, wanted: int | None = None) -> Step:
        """The next step. `wanted` are still to be asked for, this one included; None: nobody knows.

        A cancelled call takes nothing.
        """
        self._end = math.inf if wanted is None else self._asked + wanted
        self._asked += 1
        self._tell()
        try:
            while not self.ready:
                await self._moved.wait()
        except BaseException:
            self._asked -= 1
            raise
        return self.ready.popleft()

    def _tell(self) -> None:
        """Wake both sides."""
        self._moved.set()
        self._moved = trio.Event()
