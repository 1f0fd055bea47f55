"""The settings of a component: given values, converted by its signature and completed with its defaults."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from rollouts.author_code import place_of_parameter, unwrapped
from rollouts.config.convert import convert_value, default_fault, default_text, describe_type, toml_value
from rollouts.config.files import NOWHERE, Source, unknown_key, where
from rollouts.config.flags import flag_name
from rollouts.config.foreign import misplaced_hint
from rollouts.config.settings import is_secret, setting_infos
from rollouts.errors import ConfigError, SignatureError, in_lines
from rollouts.plugins.signature import Signature

Path = tuple[str, ...]


def convert_settings(
    signature: Signature, given: Mapping[str, Any], label: str, source: Source = NOWHERE, path: Path = ()
) -> dict[str, Any]:
    """Convert the given settings of a component by its signature. Defaults are not added.

    `label` names the component in errors ("environment calculator"). `path` is the path of its settings: ("env",) or
    ("reward", alias). Raises ConfigError for an unknown setting, a wrong type, and a missing setting without default.
    """
    known = {setting.name: setting for setting in signature.settings}
    for key, value in given.items():
        if key not in known:
            listing = ", ".join(
                f"{each.name} ({describe_type(each.type)}; {default_text(each)})" for each in signature.settings
            )
            hint = misplaced_hint(key, [info.name for info in setting_infos()])
            problem = in_lines(f"{label} has no setting {key!r}", hint)
            raise unknown_key((*path, key), value, source, problem, known, f"its settings: {listing or 'none'}")
    missing = [name for name, setting in known.items() if setting.is_required and name not in given]
    if missing:
        table = ".".join(path)
        raise ConfigError(
            f"{label} needs {', '.join(f'`{name}` ({describe_type(known[name].type)})' for name in missing)}\n"
            f"type: {' '.join(f'{flag_name((*path, name))} VALUE' for name in missing)}"
            + (f", or write it under [{table}] in the file" if table else "")
        )
    return {key: convert_value(value, known[key].type, (*path, key), source) for key, value in given.items()}


def complete_settings(signature: Signature, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with all defaults added, in the order of the signature, for the settings file of a run.

    Defaults that TOML cannot represent, and defaults of secrets, are not added. A setting without a value gets its
    default again.
    """
    complete: dict[str, Any] = {}
    for setting in signature.settings:
        if setting.name in settings:
            complete[setting.name] = settings[setting.name]
        elif not setting.is_required and not is_secret(setting.name):
            with contextlib.suppress(TypeError):
                toml_value(setting.default)
                complete[setting.name] = setting.default
    return complete


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
