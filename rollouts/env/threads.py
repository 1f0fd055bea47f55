"""Worker threads that cost little: a function of trio's is called in one, and its task goes on with what it returned.

`trio.to_thread` hands each job to a thread, wakes that one, and is woken by it: two switches a job. Here jobs
stand in one queue; one thread is woken at a time and drains it, and wakes the next before each job that others wait
behind. Many short jobs that come together cost one switch in all, and none waits behind a long one. Left out: how many
may run at once, deadlines (`calls.py`), and `trio.from_thread`; threads are as many as jobs need, and idle ones end.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import outcome
import trio

__all__ = ["run_in_thread"]

T = TypeVar("T")
IDLE_SECONDS = 10.0


async def run_in_thread(function: Callable[[], T]) -> T:
    """What `function` returns or raises, called in a worker thread in this task's context.

    Cancellation leaves it running, and nobody hears what comes of it. Raises RuntimeError where no thread can be
    started.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    delivery = _delivery_of_this_run()
    waiting: list[trio.lowlevel.Task] = [trio.lowlevel.current_task()]
    context = contextvars.copy_context()

    def job() -> None:
        delivery.put(waiting, outcome.capture(context.run, function))

    def abandon(_: Any) -> trio.lowlevel.Abort:
        waiting.clear()
        return trio.lowlevel.Abort.SUCCEEDED

    _crew.submit(job)
    result: T = await trio.lowlevel.wait_task_rescheduled(abandon)
    return result


class _Delivery:
    """Brings results back to one trio run: however many come together, it is woken once."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._results: deque[tuple[list[trio.lowlevel.Task], outcome.Outcome[Any]]] = deque()

    def put(self, waiting: list[trio.lowlevel.Task], result: outcome.Outcome[Any]) -> None:
        self._results.append((waiting, result))
        try:
            self._token.run_sync_soon(self._deliver, idempotent=True)
        except trio.RunFinishedError:
            return  # nobody waits any more

    def _deliver(self) -> None:
        while self._results:
            waiting, result = self._results.popleft()
            if waiting:
                trio.lowlevel.reschedule(waiting.pop(), result)


_delivery: trio.lowlevel.RunVar[_Delivery] = trio.lowlevel.RunVar("rollouts-threads-delivery")


def _delivery_of_this_run() -> _Delivery:
    try:
        return _delivery.get()
    except LookupError:
        _delivery.set(_Delivery())
        return _delivery.get()


class _Crew:
    """The threads. `_is_waking`: one was woken and has not looked at the queue yet. Everything under the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._idle: list[threading.Lock] = []
        self._is_waking = False

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.append(job)
            starts = self._wake()
        if not starts:
            return
        try:
            self._start()
        except BaseException:
            with self._lock:
                if job not in self._jobs:
                    return  # a thread that had ended another job has taken it
                self._jobs.remove(job)  # nobody may come to it after its caller was told
            raise

    def _wake(self) -> bool:
        """Have a thread look at the queue, unless one is about to; True where the caller must start one."""
        if self._is_waking:
            return False
        self._is_waking = True
        if not self._idle:
            return True
        self._idle.pop().release()
        return False

    def _start(self) -> None:
        try:
            threading.Thread(target=self._serve, name="rollouts-worker", daemon=True).start()
        except BaseException:
            with self._lock:
                self._is_waking = False
            raise

    def _serve(self) -> None:
        gate = threading.Lock()
        gate.acquire()
        while True:
            with self._lock:
                self._is_waking = False
            while (job := self._next(gate)) is not None:
                job()
                del job
            if not gate.acquire(timeout=IDLE_SECONDS):
                with self._lock:
                    if gate in self._idle:
                        self._idle.remove(gate)
                        return
                gate.acquire()  # woken at the last moment

    def _next(self, gate: threading.Lock) -> Callable[[], None] | None:
        """The next job; none: this thread is idle now. Another thread is woken for what stands behind it."""
        with self._lock:
            if not self._jobs:
                self._idle.append(gate)
                return None
            job = self._jobs.popleft()
            starts = bool(self._jobs) and self._wake()
        if starts:
            # No thread is to be had: what stands behind is done by this one, after its job, or by the next submitted.
            with contextlib.suppress(RuntimeError, MemoryError):
                self._start()
        return job


_crew = _Crew()
