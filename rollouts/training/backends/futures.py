"""Futures, and the one thread that runs all torch work of a backend in the order it was submitted.

`TrainFuture` is what every call of a training backend returns at once (Tinker's shape): submit, go on, await later.
`TorchThread` is a first-in-first-out worker: optimizer steps, forward passes and HF generation go through the same
one, so that they never overlap. Cancelling a wait leaves the job running; its result is then dropped.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

import trio

__all__ = ["ImmediateTrainFuture", "TorchThread", "TrainFuture"]

T = TypeVar("T")


class TrainFuture(Generic[T]):
    """The result of submitted work. `await future` or `await future.result()` under trio; `future.wait()` in plain
    code.
    """

    def __init__(self) -> None:
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def set_result(self, value: T) -> None:
        """Resolve the future; called once, from any thread."""
        self._future.set_result(value)

    def set_exception(self, error: BaseException) -> None:
        """Fail the future; whoever awaits it gets the error."""
        self._future.set_exception(error)

    def done(self) -> bool:
        """True once there is a result or an error."""
        return self._future.done()

    def wait(self, timeout_seconds: float | None = None) -> T:
        """Block the calling thread until done. Never call it inside a trio task. Raises TimeoutError."""
        return self._future.result(timeout_seconds)

    async def result(self) -> T:
        """Wait under trio, without blocking other tasks."""
        if not self._future.done():
            finished = trio.Event()
            token = trio.lowlevel.current_trio_token()

            def wake(_: object) -> None:
                try:
                    token.run_sync_soon(finished.set)
                except trio.RunFinishedError:
                    return  # nobody waits any more

            self._future.add_done_callback(wake)
            await finished.wait()
        return self._future.result()

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result().__await__()


class ImmediateTrainFuture(TrainFuture[T]):
    """A future that is already resolved: for work that was done synchronously."""

    def __init__(self, value: T) -> None:
        super().__init__()
        self.set_result(value)


class TorchThread:
    """One daemon thread that runs submitted functions in order. Errors go to the future, never to the thread."""

    def __init__(self, name: str = "rollouts-torch", pending_max: int = 1024) -> None:
        self._jobs: queue.Queue[tuple[TrainFuture[Any], Callable[..., Any], tuple[Any, ...]] | None] = queue.Queue(
            pending_max
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., T], *args: Any) -> TrainFuture[T]:
        """Queue `function(*args)`; returns at once. Raises queue.Full when `pending_max` jobs wait."""
        future: TrainFuture[T] = TrainFuture()
        self._jobs.put_nowait((future, function, args))
        return future

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Finish what was submitted, then end the thread."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, args = job
            try:
                value = function(*args)
            except BaseException as error:  # handed to the waiter, whatever it is
                future.set_exception(error)
            else:
                future.set_result(value)
            del job, future, function, args
