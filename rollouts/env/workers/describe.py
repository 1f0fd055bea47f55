"""The worker's side: find an environment by its name, and read its settings, as a run without a worker does.

Settings are sent as plain data: a flag with its text, because an error message names the flag; a date as TOML. Not
here: environment objects (`sessions`).
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec

from rollouts.config.convert import toml_value
from rollouts.config.files import NOWHERE, Source
from rollouts.config.flags import Flag, read_flag
from rollouts.env.authoring import metrics_of, rewards_of
from rollouts.errors import UnknownComponentError
from rollouts.plugins.index import KIND_WORDS, ComponentRef
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import Signature, check_defaults, check_signature, converted, refuse_without_hint

KIND = "environments"
FLAG, TOML = "$flag", "$toml"


class JudgeSent(NamedTuple):
    """A reward of an environment, or a metric, whose weight is 0."""

    name: str
    weight: float
    role: str | None = None


class Description(msgspec.Struct):
    """What a run knows of an environment before it has an object: the name of its class, where it comes from, the names
    of its settings, its rewards and metrics.
    """

    class_name: str
    doc: str
    ref: ComponentRef
    settings: list[str]
    rewards: list[JudgeSent]
    metrics: list[JudgeSent]


class Given(msgspec.Struct):
    """The settings that were given for the environment, the path of their table, and the file that they are in."""

    settings: Any
    path: list[str] = []
    file: str = ""
    text: str = ""


class SandboxSent(msgspec.Struct, frozen=True):
    """The sandbox that a run chose: its name, all its settings as `settings_as_sent` writes them, and how many
    episodes run at the same time.
    """

    name: str
    settings: dict[str, Any]
    concurrency: int = 1


class SandboxShown(msgspec.Struct):
    """What a sandbox is, and what it does not stop."""

    words: str
    not_stopped: list[str]


class Loaded(NamedTuple):
    """An environment that this process has imported."""

    name: str
    ref: ComponentRef
    component: Any
    signature: Signature

    @property
    def label(self) -> str:
        """The environment in error messages."""
        return f"{KIND_WORDS[KIND]} {self.name}"

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
            ref = self._manager.find(KIND, name)
            component = self._manager.load(ref)
            label = f"{KIND_WORDS[KIND]} {name}"
            signature = check_signature(component, KIND, label)
            check_defaults(component, signature, label)
            self._loaded[name] = Loaded(name, ref, component, signature)
        return self._loaded[name]

    def settings(self, name: str, sent: Any) -> dict[str, Any]:
        """Settings of the environment that `settings_as_sent` wrote, as Python values."""
        key = (name, msgspec.json.encode(sent))
        if key not in self._settings:
            self._settings[key] = converted(
                self.load(name).signature, settings_received(sent), self.load(name).label, NOWHERE, ("env",)
            )
        return self._settings[key]


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
