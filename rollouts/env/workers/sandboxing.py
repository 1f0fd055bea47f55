"""The worker's side: the sandboxes of episodes, opened by the component that is installed here.

A sandbox is open from `open_sandbox` to `close_sandbox`, and no longer than its worker. Not here: sandboxes
(`rollouts.sandboxes`).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import msgspec
import trio

from rollouts.config.files import NOWHERE
from rollouts.env import calls
from rollouts.env.workers.describe import SandboxSent, SandboxShown, settings_received
from rollouts.errors import ConfigError
from rollouts.plugins.index import KIND_WORDS
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import check_defaults, check_signature, converted
from rollouts.sandboxes.base import Sandbox, Sandboxes
from rollouts.sandboxes.opening import Lease, make_sandboxes, try_sandbox

KIND = "sandboxes"


def read_sandbox(name: str, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The component of this name, and all its settings as Python values. Raises UserError."""
    label, manager = f"{KIND_WORDS[KIND]} {name}", PluginManager()
    component = manager.load(manager.find(KIND, name))
    signature = check_signature(component, KIND, label)
    check_defaults(component, signature, label)
    return component, converted(signature, given, label, NOWHERE, ("sandbox",))


class OpenSandboxes:
    """The open sandboxes of a worker, by the number of the environment object. A worker of a server has `only` that
    environment, and opens the sandbox that its server `allows`.
    """

    def __init__(self, only: str = "", allows: SandboxSent | None = None) -> None:
        self._only, self._allows = only, allows
        self._made: dict[bytes, Sandboxes] = {}
        self._leases: dict[int, Lease] = {}
        self._making = trio.Lock()

    async def show(self, sent: SandboxSent) -> SandboxShown:
        """Check the sandbox that a run chose. Raises UserError."""
        made = await self._sandboxes(sent)
        return SandboxShown(made.words, list(made.not_stopped))

    async def try_one(self, sent: SandboxSent) -> None:
        """Open one for a moment. Raises ConfigError."""
        made = await self._sandboxes(sent)
        await trio.to_thread.run_sync(try_sandbox, sent.name, made, abandon_on_cancel=True)

    async def open(self, number: int, sent: SandboxSent, seconds: float) -> None:
        """Open the sandbox of an environment object. Raises SandboxError, CallTimeoutError."""
        lease = self._leases[number] = Lease(await self._sandboxes(sent))
        # A separate limiter, so that tools do not wait for sandboxes that start.
        await calls.call(lease.open, timeout_seconds=seconds, limiter=trio.CapacityLimiter(1))

    def inputs(self, number: int) -> dict[str, Sandbox]:
        """What `setup` of this environment object gets: the sandbox, if one was opened."""
        lease = self._leases.get(number)
        return {} if lease is None or lease.sandbox is None else {"sandbox": lease.sandbox}

    async def close(self, number: int, seconds: float = math.inf) -> str:
        """Close the sandbox of an environment object, if it has one. Returns why it was lost; "" if it was not."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return ""
        await calls.call(lease.close, timeout_seconds=seconds, limiter=trio.CapacityLimiter(1))
        return lease.lost

    async def close_all(self, seconds: float) -> None:
        """Close those that are left."""
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for number in list(self._leases):
                    nursery.start_soon(self.close, number)

    async def _sandboxes(self, sent: SandboxSent) -> Sandboxes:
        self._check_allowed(sent)
        key = msgspec.json.encode(sent)
        async with self._making:  # it limits how many start at the same time, so all episodes use one object
            if key not in self._made:
                self._made[key] = await trio.to_thread.run_sync(functools.partial(_made, sent))
        return self._made[key]

    def _check_allowed(self, sent: SandboxSent) -> None:
        """Raise ConfigError if the server does not open this sandbox: its owner chooses where commands of others
        run.
        """
        allows = self._allows
        if not self._only or (allows is not None and (allows.name, allows.settings) == (sent.name, sent.settings)):
            return
        if allows is None:
            raise ConfigError(
                f"the environment {self._only} asks for a sandbox, and its server opens none\n"
                f"type, on that host: rollouts env serve {self._only} --sandbox {sent.name}"
            )
        other = {name: value for name, value in allows.settings.items() if sent.settings.get(name) != value}
        flags = [f"--sandbox.{name.replace('_', '-')} {value}" for name, value in other.items()]
        raise ConfigError(
            f"the server of {self._only} opens the sandbox {allows.name} with settings of its own, and no other\n"
            f"type: {' '.join(['--sandbox', allows.name, *flags])}"
        )


def _made(sent: SandboxSent) -> Sandboxes:
    component, settings = read_sandbox(sent.name, settings_received(sent.settings))
    return make_sandboxes(sent.name, component, settings, sent.concurrency)
