"""From a component to sandboxes that work on this machine, and to the sandbox of one episode."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from rollouts.author_code import authors_code
from rollouts.errors import ConfigError, SignatureError, words_of
from rollouts.plugins.signature import make
from rollouts.sandboxes.base import Sandbox, Sandboxes

TRY = ["true"]
TRY_SECONDS = 60.0


def make_sandboxes(name: str, component: Any, settings: Mapping[str, Any], concurrency: int) -> Sandboxes:
    """The sandboxes of a component, checked. Raises UserError."""
    made = make("sandbox", name, component, {"concurrency": concurrency}, settings)
    if not isinstance(made, Sandboxes):
        lacks = [each for each in ("words", "not_stopped", "check", "open") if not hasattr(made, each)]
        raise SignatureError(f"the sandbox {name} made {type(made).__name__}, which has no {', '.join(lacks)}")
    made.check()
    return made


def try_sandbox(name: str, sandboxes: Sandboxes) -> None:
    """Open a sandbox, and run `true` in it. Raises ConfigError."""
    try:
        with authors_code():
            sandbox: Sandbox = sandboxes.open()
            try:
                result = sandbox.exec(TRY, seconds=TRY_SECONDS)
            finally:
                sandbox.close()
    except Exception as error:  # any package's sandbox may raise anything
        raise ConfigError(f"--sandbox {name}: {words_of(error)}") from error
    if result.exit_code:
        raise ConfigError(f"--sandbox {name}: the command `true` failed: {result.text}")


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
