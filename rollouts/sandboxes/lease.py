"""The sandbox of one episode: opened in a worker thread, and closed in any case."""

from __future__ import annotations

import threading

from rollouts.sandboxes.base import Sandbox, Sandboxes


class Lease:
    """Holds at most one sandbox. `open` may still run in its thread when the task that waited for it is cancelled; the
    sandbox that it gets after `close` is closed at once. `lost` says why the sandbox was lost; "" if it was not. It is
    complete after `close`.
    """

    def __init__(self, sandboxes: Sandboxes) -> None:
        self.sandbox: Sandbox | None = None
        self.lost = ""
        self._sandboxes = sandboxes
        self._is_closed = False
        self._lock = threading.Lock()

    def open(self) -> Sandbox:
        """Open the sandbox. Raises SandboxError."""
        sandbox = self._sandboxes.open()
        with self._lock:
            self.sandbox = sandbox
            is_closed = self._is_closed
        if is_closed:
            sandbox.close()
        return sandbox

    def close(self) -> None:
        """Close the sandbox, if there is one."""
        with self._lock:
            self._is_closed = True
            sandbox = self.sandbox
        if sandbox is not None:
            self.lost = sandbox.lost
            sandbox.close()
