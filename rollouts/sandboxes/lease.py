"""The sandbox of one episode: opened in a worker thread, and closed in any case."""

from __future__ import annotations

import threading

from rollouts.sandboxes.base import Sandbox, Sandboxes


class Lease:
    """Holds at most one sandbox. `open` may still run in its thread when the task that waited for it is cancelled; the
    sandbox that it gets after `close` is closed at once.
    """

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._sandbox: Sandbox | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def lost(self) -> str:
        """Why the sandbox was lost; "" if it was not."""
        return self._sandbox.lost if self._sandbox is not None else ""

    def open(self) -> Sandbox:
        """Open the sandbox. Raises SandboxError."""
        sandbox = self._sandboxes.open()
        with self._lock:
            self._sandbox = sandbox
            is_closed = self._is_closed
        if is_closed:
            sandbox.close()
        return sandbox

    def close(self) -> None:
        """Close the sandbox, if there is one."""
        with self._lock:
            self._is_closed = True
            sandbox = self._sandbox
        if sandbox is not None:
            sandbox.close()
