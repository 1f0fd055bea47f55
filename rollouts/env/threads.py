"""Fast worker threads: a trio task calls a function in a thread, and continues with its result.

`trio.to_thread` wakes one thread for each job, and the thread wakes trio: two switches for each job. Here the jobs wait
in one queue. One thread is woken at a time, and it takes jobs until the queue is empty. Before a thread runs a job
while other jobs wait, it wakes another thread. So many short jobs that arrive together need only one thread switch, and
no job waits for a long one. There are as many threads as the jobs need, and idle threads end. An `AuthorThread` is one
thread for code that is called again and again, such as a generator of tasks. Not here: limits and deadlines
(`calls.py`), and `trio.from_thread`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import outcome
import trio

from rollouts.author_code import authors_code

T = TypeVar("T")
IDLE_SECONDS = 10.0


async def run_in_thread(function: Callable[[], T], count_abandoned: Callable[[int], None] = lambda change: None) -> T:
    """The result of `function`, called in a worker thread with this task's context.

    If the task is cancelled before the function begins, the function is not called. If the function has begun, it
    continues, and its result is dropped: `count_abandoned` is called with +1 then, and with -1 when the function ends.
    Raises the function's error, or RuntimeError if no thread can be started.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    job = _Job(functools.partial(contextvars.copy_context().run, function), count_abandoned)
    _workers.submit(job)
    result: T = await trio.lowlevel.wait_task_rescheduled(job.abandon)
    return result


def of_this_run(variable: trio.lowlevel.RunVar[T], make: Callable[[], T]) -> T:
    """The variable's value in the current trio run. `make` creates it on the first call."""
    try:
        return variable.get()
    except LookupError:
        variable.set(made := make())
        return made


class _Job:
    """A function that a task waits for, and may abandon. The state changes only under the lock."""

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
                return  # abandoned before it began, so it must not be called
            self._state = "running"
        result = outcome.capture(self._function)
        with self._lock:
            was_abandoned, self._state = self._state == "abandoned", "done"
        if was_abandoned:
            self._count_abandoned(-1)
        else:
            self._delivery.put(self, result)

    def abandon(self, _: Any) -> trio.lowlevel.Abort:
        """Stop waiting for the function. trio calls this when the task is cancelled."""
        self.waiting = None
        with self._lock:
            if self._state == "running":
                self._count_abandoned(+1)
            if self._state != "done":
                self._state = "abandoned"
        return trio.lowlevel.Abort.SUCCEEDED


class _Delivery:
    """Passes results to one trio run, which is woken once for all results that arrive together."""

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


class _WorkerThreads:
    """The threads. `_is_waking`: a thread was woken and has not looked at the queue yet. The lock guards all state."""

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
                    return  # another thread was free and has taken this job
                self._jobs.remove(job)  # no thread may take it after its caller got the error
            raise

    def _wake(self) -> bool:
        """Wake an idle thread, unless one was just woken. Returns True if the caller must start a thread."""
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
                gate.acquire()  # another thread has just woken this one

    def _next(self, gate: threading.Lock) -> _Job | None:
        """The next job. None if the queue is empty: this thread is now idle. If more jobs wait, wakes another
        thread.
        """
        with self._lock:
            if not self._jobs:
                self._idle.append(gate)
                return None
            job = self._jobs.popleft()
            starts = bool(self._jobs) and self._wake()
        if starts:
            # If no thread can be started, this thread runs the other jobs after its own, or the next `submit` starts
            # one.
            with contextlib.suppress(RuntimeError, MemoryError):
                self._start()
        return job


_workers = _WorkerThreads()


# --- one thread for one author ----------------------------------------------------------------------------------------


_Asked = Callable[[], Any] | None


class AuthorThread:
    """Runs one function at a time. The thread ends with this object. `is_late`: a call ran past its deadline.
    `is_left`: the caller of the last call stopped waiting, so the daemon thread is abandoned.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[outcome.Outcome[Any]] = queue.SimpleQueue()
        self.is_late = self.is_left = False
        # The thread has no reference to this object, so that the object can be collected while the thread waits.
        arguments = (self._requests, self._results)
        threading.Thread(target=_serve, args=arguments, name="rollouts-worker-tasks", daemon=True).start()

    def __del__(self) -> None:
        self._requests.put(None)

    def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """The result of `function`. After a timeout or Ctrl-C this object must not be used again.

        Raises:
            TimeoutError: `function` takes longer than `seconds`.
            Exception: an error of `function`, as `rollouts.author_code` returns it.
        """
        assert not self.is_left, "an earlier call still runs"
        self._requests.put(function)
        self.is_left = True  # True until the result is here, because any exception may end the wait
        try:
            result = self._results.get(timeout=None if math.isinf(seconds) else seconds)
        except queue.Empty:
            self.is_late = True
            raise TimeoutError(f"it took longer than {seconds:g} seconds") from None
        self.is_left = False
        return result.unwrap()


def _serve(requests: queue.SimpleQueue[_Asked], results: queue.SimpleQueue[outcome.Outcome[Any]]) -> None:
    while (function := requests.get()) is not None:
        results.put(outcome.capture(_guarded, function))
        function = None  # the function may keep its caller's objects alive


def _guarded(function: Callable[[], Any]) -> Any:
    with authors_code():
        return function()
