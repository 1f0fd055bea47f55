"""A logger in a thread of its own, so that a service which is slow, hangs or fails neither delays nor ends a run.

The thread makes the logger, calls it and closes it. Calls wait in a queue of a limited size. A call that fails is tried
again after growing pauses; then it is lost, and the next one is tried. Not here: which loggers of a run need no thread,
and what a user sees of lost calls (`rollouts.runs.loggers`).
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from rollouts.author_code import authors_code
from rollouts.errors import RunError
from rollouts.loggers.base import MetricsLogger

CALLS_MAX = 1000
"""How many calls may wait. If there are more, the oldest one is lost."""

PAUSES_SECONDS = (1.0, 5.0, 30.0, 120.0)
"""The pauses before a call that failed is tried again."""


class BackgroundLogger:
    """Makes a logger in a thread, and passes calls on to it.

    Attributes:
        logger: the logger; only the thread may call it
        calls: how many calls it was given
        lost: how many of them it has not recorded, and will not
        error: the last error that it raised
        close_failed: whether the last error is that of its `close`
    """

    def __init__(self, make: Callable[[], MetricsLogger], name: str, seconds_max: float | None = None) -> None:
        """Waits until the logger is made. Raises what `make` raises, and RunError after `seconds_max`; a logger that is
        made later is closed at once.
        """
        self.calls = self.lost = 0
        self.error: Exception | None = None
        self.close_failed = False
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_busy = self._ends = False
        self._changed = threading.Condition()
        made: Future[MetricsLogger] = Future()
        # A daemon, so that a logger that hangs does not keep the process.
        self._thread = threading.Thread(target=self._run, args=(make, made), name=f"logger {name}", daemon=True)
        self._thread.start()
        if not wait([made], seconds_max).done:
            self.end()
            raise RunError(f"it was not made within {seconds_max:g} s")
        self.logger = made.result()

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a method of the logger in the thread, after all earlier calls. Returns at once."""
        with self._changed:
            self.calls += 1
            if len(self._waiting) >= CALLS_MAX:
                self._waiting.popleft()
                self.lost += 1
            self._waiting.append(functools.partial(function, *arguments))
            self._changed.notify()

    def end(self) -> None:
        """Close the logger after the calls that still wait. From now on, a call that fails is not tried again."""
        with self._changed:
            self._ends = True
            self._changed.notify()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for the logger to be closed. Returns whether it is."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Count the calls that the logger has not finished as lost. Call it if it does not end."""
        with self._changed:
            self.lost += len(self._waiting) + self._is_busy
            self._waiting.clear()
            self._is_busy = False

    def _run(self, make: Callable[[], MetricsLogger], made: Future[MetricsLogger]) -> None:
        try:
            with authors_code():
                logger = make()
        except BaseException as error:  # raised where the logger is opened
            made.set_exception(error)
            return
        made.set_result(logger)
        while (function := self._next()) is not None:
            is_recorded = self._keep_trying(function)
            with self._changed:
                self.lost += self._is_busy and not is_recorded
                self._is_busy = False
        self.close_failed = not self._try(logger.close)

    def _next(self) -> Callable[[], None] | None:
        """The oldest call that waits; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ends)
            self._is_busy = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None

    def _keep_trying(self, function: Callable[[], None]) -> bool:
        """Call the function until it succeeds, as often as there are pauses. Returns whether it did."""
        pauses = iter(PAUSES_SECONDS)
        while not self._try(function):
            pause = next(pauses, None)
            if self._ends or pause is None:
                return False
            with self._changed:
                self._changed.wait_for(lambda: self._ends, pause)
        return True

    def _try(self, function: Callable[[], None]) -> bool:
        try:
            with authors_code():
                function()
        except Exception as error:  # a logger may raise anything
            self.error = error
            return False
        return True
