"""Worker threads that cost little: a trio task calls a function in one, and continues with what it returned.

`trio.to_thread` hands each job to a thread, wakes that one, and is woken by it: two switches a job. Here jobs
wait in one queue; one thread is woken at a time and drains it, and wakes the next before each job that others wait
behind. Many short jobs that come together cost one switch in all, and none waits behind a long one. Left out: how many
may run at once, deadlines (`calls.py`), and `trio.from_thread`; threads are as many as jobs need, and idle ones end.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import outcome
import trio

T = TypeVar("T")
IDLE_SECONDS = 10.0


async def run_in_thread(function: Callable[[], T], count_abandoned: Callable[[int], None] = lambda change: None) -> T:
    """What `function` returns or raises, called in a worker thread in this task's context.

    Cancellation drops a function that has not begun. One that has is left running and its result is dropped;
    `count_abandoned` is called with +1 then, and with -1 when it ends. Raises RuntimeError where no thread can be
    started.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    job = _Job(functools.partial(contextvars.copy_context().run, function), count_abandoned)
    _crew.submit(job)
    result: T = await trio.lowlevel.wait_task_rescheduled(job.abandon)
    return result


def of_this_run(variable: trio.lowlevel.RunVar[T], make: Callable[[], T]) -> T:
    """The variable's value in the current trio run, made when it is first asked for."""
    try:
        return variable.get()
    except LookupError:
        variable.set(made := make())
        return made


class _Job:
    """A function that a task waits for, and may give up. Every change of state is under its lock."""

    def __init__(self, function: Callable[[], Any], count_abandoned: Callable[[int], None]) -> None:
        self.waiting: trio.lowlevel.Task | None = trio.lowlevel.current_task()
        self._function = function
        self._count_abandoned = count_abandoned
        self._delivery = of_this_run(_delivery, _Delivery)
        self._lock = threading.Lock()
        self._state = "waiting"  # running, done, abandoned

    def run(self) -> None:
        """Call the function and deliver the result."""
        with self._lock:
            if self._state == "abandoned":
                return  # given up before it began: its side effects must not come later
            self._state = "running"
        result = outcome.capture(self._function)
        with self._lock:
            was_abandoned, self._state = self._state == "abandoned", "done"
        if was_abandoned:
            self._count_abandoned(-1)
        else:
            self._delivery.put(self, result)

    def abandon(self, _: Any) -> trio.lowlevel.Abort:
        """Give it up: its task is cancelled."""
        self.waiting = None
        with self._lock:
            if self._state == "running":
                self._count_abandoned(+1)
            if self._state != "done":
                self._state = "abandoned"
        return trio.lowlevel.Abort.SUCCEEDED


class _Delivery:
    """Brings results back to one trio run: however many come together, it is woken once."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._results: deque[tuple[_Job, outcome.Outcome[Any]]] = deque()

    def put(self, job: _Job, result: outcome.Outcome[Any]) -> None:
        self._results.append((job, result))
        with contextlib.suppress(trio.RunFinishedError):  # no task waits any more
            self._token.run_sync_soon(self._deliver, idempotent=True)

    def _deliver(self) -> None:
        while self._results:
            job, result = self._results.popleft()
            if job.waiting is not None:
                trio.lowlevel.reschedule(job.waiting, result)


_delivery: trio.lowlevel.RunVar[_Delivery] = trio.lowlevel.RunVar("rollouts-threads-delivery")


class _Crew:
    """The threads. `_is_waking`: one was woken and has not looked at the queue yet. Everything under the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._idle: list[threading.Lock] = []
        self._is_waking = False

    def submit(self, job: _Job) -> None:
        with self._lock:
            self._jobs.append(job)
            if not self._wake():
                return
        try:
            self._start()
        except BaseException:
            with self._lock:
                if job not in self._jobs:
                    return  # a thread that had ended another job has taken it
                self._jobs.remove(job)  # no thread may take it once its caller has the error
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
                job.run()
                del job
            if not gate.acquire(timeout=IDLE_SECONDS):
                with self._lock:
                    if gate in self._idle:
                        self._idle.remove(gate)
                        return
                gate.acquire()  # woken at the last moment

    def _next(self, gate: threading.Lock) -> _Job | None:
        """The next job; none: this thread is idle now. Another thread is woken for the jobs behind it."""
        with self._lock:
            if not self._jobs:
                self._idle.append(gate)
                return None
            job = self._jobs.popleft()
            starts = bool(self._jobs) and self._wake()
        if starts:
            # No thread can be started: the jobs behind are done by this one, after its job, or by the next submitted.
            with contextlib.suppress(RuntimeError, MemoryError):
                self._start()
        return job


_crew = _Crew()
