"""The worker's side: the environments that it has imported, and the sandboxes of its episodes.

Both are found, checked and configured as in a run without a worker. Settings are sent as plain data: a flag with its
text, because an error message names the flag; a date as TOML. A sandbox is open from `open_sandbox` to `close_sandbox`,
and no longer than its worker. Not here: environment objects (`sessions`), and sandboxes (`rollouts.sandboxes`).
"""

from __future__ import annotations

import datetime
import functools
import math
import tomllib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec
import trio

from rollouts.config.convert import toml_value
from rollouts.config.files import NOWHERE, Source
from rollouts.config.flags import Flag, read_flag
from rollouts.env import calls
from rollouts.env.authoring import metrics_of, rewards_of
from rollouts.env.workers.protocol import Description, Given, JudgeSent, SandboxSent, SandboxShown
from rollouts.errors import ConfigError, UnknownComponentError
from rollouts.plugins.index import KIND_WORDS, ComponentRef
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import Signature, check_defaults, check_signature, converted, refuse_without_hint
from rollouts.sandboxes.base import Lease, Sandbox, Sandboxes, make_sandboxes, try_sandbox

FLAG, TOML = "$flag", "$toml"


class Loaded(NamedTuple):
    """A component that this process has imported. `label` names it in error messages."""

    label: str
    ref: ComponentRef
    component: Any
    signature: Signature

    def describe(self) -> Description:
        """Its description."""
        rewards, metrics = (
            [JudgeSent(each.name, each.weight, each.role) for each in found]
            for found in (rewards_of(self.component), metrics_of(self.component))
        )
        name = str(getattr(self.component, "__name__", type(self.component).__name__))
        doc = str(getattr(self.component, "__doc__", None) or "")
        return Description(name, doc, self.ref, [each.name for each in self.signature.settings], rewards, metrics)

    def configure(self, given: Given) -> dict[str, Any]:
        """All settings as Python values. Raises ConfigError, as for an environment without a worker."""
        settings, source = settings_received(given.settings), Source(given.file, given.text)
        path = tuple(given.path)
        refuse_without_hint(self.component, self.signature, settings, self.label, source, path)
        return converted(self.signature, settings, self.label, source, path)


class Library:
    """The environments that this process has imported, by their names. With `only`, it loads that one alone."""

    def __init__(self, only: str = "") -> None:
        self._only = only
        self._manager = PluginManager()
        self._loaded: dict[str, Loaded] = {}
        self._settings: dict[tuple[str, bytes], dict[str, Any]] = {}

    def load(self, name: str) -> Loaded:
        """Find, import and check an environment. Raises PluginError."""
        if self._only and name != self._only:
            raise UnknownComponentError(f"this worker has the environment {self._only!r}, and no {name!r}")
        if name not in self._loaded:
            self._loaded[name] = _load(self._manager, "environments", name)
        return self._loaded[name]

    def settings(self, name: str, sent: Any) -> dict[str, Any]:
        """Settings of the environment that `settings_as_sent` wrote, as Python values."""
        key = (name, msgspec.json.encode(sent))
        if key not in self._settings:
            loaded = self.load(name)
            given = settings_received(sent)
            self._settings[key] = converted(loaded.signature, given, loaded.label, NOWHERE, ("env",))
        return self._settings[key]


def _load(manager: PluginManager, kind: str, name: str) -> Loaded:
    ref, label = manager.find(kind, name), f"{KIND_WORDS[kind]} {name}"
    component = manager.load(ref)
    signature = check_signature(component, kind, label)
    check_defaults(component, signature, label)
    return Loaded(label, ref, component, signature)


def settings_as_sent(value: Any) -> Any:
    """Settings as plain data. Raises TypeError for a value that TOML cannot hold."""
    if isinstance(value, Flag):
        return {FLAG: value.text}
    if isinstance(value, Mapping):
        return {str(key): settings_as_sent(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [settings_as_sent(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str | PurePath):
        return str(value) if isinstance(value, PurePath) else value
    if isinstance(value, datetime.date | datetime.time):
        return {TOML: toml_value(value)}
    return settings_as_sent(tomllib.loads(f"value = {toml_value(value)}")["value"])  # an enum, a dataclass


def settings_received(value: Any) -> Any:
    """The settings that `settings_as_sent` wrote."""
    if isinstance(value, dict):
        if value.keys() == {FLAG}:
            return read_flag(value[FLAG])
        if value.keys() == {TOML}:
            return tomllib.loads(f"value = {value[TOML]}")["value"]
        return {key: settings_received(each) for key, each in value.items()}
    return [settings_received(each) for each in value] if isinstance(value, list) else value


# --- sandboxes --------------------------------------------------------------------------------------------------------


def read_sandbox(name: str, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The component of this name, and all its settings as Python values. Raises UserError."""
    loaded = _load(PluginManager(), "sandboxes", name)
    return loaded.component, converted(loaded.signature, given, loaded.label, NOWHERE, ("sandbox",))


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
