"""The settings of a component: given values, converted by its signature and completed with its defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rollouts.author_code import place_of_parameter, unwrapped
from rollouts.config.convert import complete_settings, convert_settings, default_fault
from rollouts.config.files import Source, where
from rollouts.errors import ConfigError, SignatureError
from rollouts.plugins.signature import Signature

Path = tuple[str, ...]


def converted(signature: Signature, given: Mapping[str, Any], label: str, source: Source, path: Path) -> dict[str, Any]:
    """All settings of a component, as Python values. Raises ConfigError, which says where a wrong one was given."""
    return complete_settings(signature, convert_settings(signature, given, label, source, path))


def check_defaults(found: Any, signature: Signature, label: str) -> None:
    """Raise SignatureError for a default that does not fit its hint: the run's own config.toml would hold it."""
    for setting in signature.settings:
        if fault := default_fault(setting):
            owner = getattr(unwrapped(found), "__qualname__", label)
            place = place_of_parameter(found, setting.name)
            again = "give it a default that fits its hint, or another hint"
            raise SignatureError(f"{owner}.{setting.name}: {fault}{f' ({place})' if place else ''}\n{again}")


def refuse_without_hint(
    found: Any, signature: Signature, given: Mapping[str, Any], label: str, source: Source, path: Path
) -> None:
    """Refuse a setting that a dataclass writes without a type hint: `mood = "kind"` is no field."""
    known = {setting.name for setting in signature.settings}
    for name in given if dataclasses.is_dataclass(found) else ():
        if name not in known and not callable(vars(found).get(name, callable)):
            place = where((*path, name), given[name], source)
            why = f"in the dataclass, {name} has no type hint, so it is no setting\nwrite `{name}: TYPE = ...`"
            raise ConfigError(f"{place}: {label} has no setting {name!r}: {why}")
