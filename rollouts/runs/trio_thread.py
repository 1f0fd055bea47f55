"""trio in a separate thread, so that the main thread can wait for input, and gets Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Self, TypeVar

import outcome
import trio

T = TypeVar("T")


class TrioThread:
    """A context manager that enters an async context manager in a thread that runs trio. `value` is the result of
    entering it.

    Leaving exits the async context manager and waits for the thread. A Ctrl-C while it is entered exits it too. Raises
    the exceptions of the async context manager.
    """

    def __init__(self, inner: AbstractAsyncContextManager[Any]) -> None:
        self._inner = inner
        self._thread = threading.Thread(target=self._run, name="rollouts-trio")
        self._began, self._is_open = threading.Event(), threading.Event()
        self._result: outcome.Maybe[None] = outcome.Value(None)
        self._opening, self._closing = trio.CancelScope(), trio.Event()
        self.value: Any = None
        self._token: trio.lowlevel.TrioToken | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._is_open.wait()
        except KeyboardInterrupt:
            self._end()
            raise
        self._result.unwrap()  # the thread may still be ending, so its life says nothing
        return self

    def __exit__(self, *exc: Any) -> None:
        self._end()
        if exc[0] is None:
            self._result.unwrap()

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call an async function in the trio thread. Returns its result. The first Ctrl-C cancels the function, and is
        raised when it has ended; a second Ctrl-C is raised at once.
        """
        scope, over = trio.CancelScope(), threading.Event()

        async def cancellable() -> T | None:
            try:
                with scope:
                    return await function(*args)
                return None
            finally:
                over.set()

        assert self._token is not None, "enter it first"
        try:
            return trio.from_thread.run(cancellable, trio_token=self._token)  # type: ignore[return-value]
        except KeyboardInterrupt:
            self._soon(scope.cancel)
            over.wait()
            raise
        except (trio.RunFinishedError, trio.Cancelled):  # the async context manager failed, and the thread has ended
            self._thread.join()
            self._result.unwrap()
            raise

    def _run(self) -> None:
        self._result = outcome.capture(trio.run, self._main)
        self._began.set()
        self._is_open.set()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._began.set()
        with self._opening:
            async with self._inner as self.value:
                self._is_open.set()
                await self._closing.wait()

    def _end(self) -> None:
        self._began.wait()
        self._soon(self._closing.set if self._is_open.is_set() else self._opening.cancel)
        self._thread.join()

    def _soon(self, function: Callable[[], None]) -> None:
        if self._token is not None:
            try:
                self._token.run_sync_soon(function)
            except trio.RunFinishedError:
                return  # the thread has already ended
