"""A thread for an author's plain code that is called again and again, such as a generator of tasks.

The caller waits in another thread, so it can stop waiting at a deadline. An AuthorThread always uses the same thread,
so code can open a connection in one call and use it in later calls. Not here: calls of the agent loop, which run in
many threads (`calls`).
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from typing import Any

import outcome

from rollouts.author_code import authors_code

Request = Callable[[], Any] | None


class AuthorThread:
    """Runs one function at a time. The thread ends with this object. `is_late`: a call ran past its deadline.
    `is_left`: the caller of the last call stopped waiting, so the daemon thread is abandoned.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
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


def _serve(requests: queue.SimpleQueue[Request], results: queue.SimpleQueue[outcome.Outcome[Any]]) -> None:
    while (function := requests.get()) is not None:
        results.put(outcome.capture(_guarded, function))
        function = None  # the function may keep its caller's objects alive


def _guarded(function: Callable[[], Any]) -> Any:
    with authors_code():
        return function()
