"""A trio loop for what outlives single calls of an environment, such as connections whose pings must be answered while
the model generates.

The loop is that of an async `shared`, which has a thread of its own:

    async def shared(self):
        async with background() as loop:
            yield loop

    async def setup(self, task, shared):
        self.connection = await shared.run(connect, self.url)
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import trio

from rollouts.errors import ServiceLostError

T = TypeVar("T")


class Background:
    """A trio loop that tasks of other trio runs may use."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery, self._token = nursery, trio.lowlevel.current_trio_token()

    async def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The result of an async function, which runs in the loop. If the task that waits is cancelled, the function is
        cancelled too. Raises what the function raises, and ServiceLostError if the loop has ended.
        """
        done, here, scope = trio.Event(), trio.lowlevel.current_trio_token(), trio.CancelScope()
        results, errors = list[T](), list[Exception]()

        async def body() -> None:
            try:
                with scope:
                    results.append(await function(*args))
            except Exception as error:  # the caller raises it
                errors.append(error)
            finally:
                _soon(here, done.set)

        def start() -> None:
            try:
                self.start(body)
            except RuntimeError:  # the loop is ending
                _soon(here, done.set)

        if _soon(self._token, start):
            try:
                await done.wait()
            except trio.Cancelled:
                _soon(self._token, scope.cancel)
                raise
        for error in errors:
            raise error
        if not results:
            raise ServiceLostError("the loop of the environment's connections has ended")
        return results[0]

    def start(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Start a task that no caller waits for. To be called in the loop."""
        self._nursery.start_soon(function, *args)


@contextlib.asynccontextmanager
async def background() -> AsyncIterator[Background]:
    """The loop of this trio run. At the end of the block its tasks are cancelled."""
    async with trio.open_nursery() as nursery:
        yield Background(nursery)
        nursery.cancel_scope.cancel()


def _soon(token: trio.lowlevel.TrioToken, function: Callable[[], object]) -> bool:
    """Have another trio run call a function. False if it has ended."""
    try:
        token.run_sync_soon(function)
    except trio.RunFinishedError:
        return False
    return True
