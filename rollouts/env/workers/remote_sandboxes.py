"""The run's side: sandboxes that the workers of an environment open, each in the worker of its episode."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any

from rollouts.config.workers import VENV
from rollouts.env.calls import RemoteCall
from rollouts.env.workers.describe import SandboxSent, SandboxShown
from rollouts.env.workers.pool import WorkerPool
from rollouts.errors import ConfigError, UnknownComponentError, WorkerError, WorkersLostError, in_lines, said_of

Request = Callable[..., Awaitable[Any]]
"""Makes a request of an environment object; see `WorkerPool.call_async`."""


class RemoteSandboxes:
    """Sandboxes in the workers of one environment, made by the component that is installed there. `words` and
    `not_stopped` are those of `Sandboxes`.

    Raises UserError if the workers cannot open one.
    """

    def __init__(self, pool: WorkerPool, sent: SandboxSent) -> None:
        self.sent, self._pool = sent, pool
        try:
            shown: SandboxShown = self._ask("show_sandbox", SandboxShown)
        except UnknownComponentError as error:
            hint = f"type: rollouts env install PACKAGE --with PACKAGE-OF-{sent.name}"
            raise UnknownComponentError(in_lines(str(error), hint if pool.settings.kind == VENV else "")) from error
        self.words, self.not_stopped = shown.words, shown.not_stopped

    def try_one(self) -> None:
        """Open one for a moment. Raises ConfigError."""
        self._ask("try_sandbox", None)

    def _ask(self, method: str, kind: Any) -> Any:
        with said_of(f"the worker {self._pool.name}"):
            try:
                return self._pool.call(method, self.sent, kind=kind)
            except WorkerError as error:
                raise ConfigError(str(error)) from error


class RemoteLease:
    """The sandbox of one episode, in the worker that has its environment object; see `rollouts.sandboxes.opening`."""

    def __init__(self, request: Request, sandboxes: RemoteSandboxes) -> None:
        self.lost = ""
        self.request, self.sent = request, sandboxes.sent
        self.open, self.close = _Open(self), _Close(self)


class _Open(RemoteCall):
    def __init__(self, lease: RemoteLease) -> None:
        self._lease = lease

    async def call(self, *args: Any, seconds: float = math.inf) -> None:
        await self._lease.request("open_sandbox", self._lease.sent, seconds=seconds)


class _Close(RemoteCall):
    def __init__(self, lease: RemoteLease) -> None:
        self._lease = lease

    async def call(self, *args: Any, seconds: float = math.inf) -> None:
        with contextlib.suppress(WorkerError, WorkersLostError):  # it has ended with its worker
            self._lease.lost = await self._lease.request("close_sandbox", kind=str, seconds=seconds)
