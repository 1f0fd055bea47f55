"""Values into types, by msgspec, with messages that say where the value was given and what was expected.

Files are strict: a whole number is no text and 3.0 is no whole number. A flag has no type of its own; it was read as
TOML, and where a setting is text its own characters count. `none` is None wherever a setting admits None.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from rollouts.config.files import NOWHERE, Source, where
from rollouts.config.flags import Flag, flag_name
from rollouts.config.secret_names import is_secret
from rollouts.config.values import admits_none, choices_of, describe_type, members_of, toml_value
from rollouts.errors import ConfigError, near_misses

if TYPE_CHECKING:
    from rollouts.plugins.signature import Setting, Signature

__all__ = ["complete_settings", "convert_settings", "convert_value", "plain", "unknown_key"]

Path = tuple[str, ...]
SHOWN_MAX = 200  # characters of a wrong value


def plain(value: Any) -> Any:
    """The value with every `Flag` in it replaced by what it reads as."""
    return _map_flags(value, lambda flag: flag.value)


def _map_flags(value: Any, replace: typing.Callable[[Flag], Any]) -> Any:
    if isinstance(value, Flag):
        return replace(value)
    if isinstance(value, dict):
        return {key: _map_flags(inner, replace) for key, inner in value.items()}
    if isinstance(value, list):
        return [_map_flags(inner, replace) for inner in value]
    return value


def convert_value(value: Any, hint: Any, path: Path, source: Source = NOWHERE) -> Any:
    """A value as the type asks. Raises ConfigError, which says where it was given and what was expected."""
    if _means_none(value) and "none" in choices_of(hint):
        value = value.text if isinstance(value, Flag) else value
    elif _means_none(value) and admits_none(hint):
        return None
    _check_keys(value, hint, path, source)
    attempts = [(plain(value), True)]
    if isinstance(value, Flag):
        attempts.append((value.text, True))
    elif isinstance(value, dict | list):
        attempts.append((_map_flags(value, lambda flag: flag.text), _flagless(value)))
    refusal: Exception | None = None
    for candidate, strict in attempts:
        try:
            return msgspec.convert(candidate, hint, strict=strict, dec_hook=_convert_other)
        except msgspec.ValidationError as error:
            refusal = refusal or error
        except (TypeError, NotImplementedError):
            # A type that msgspec does not know; only enums of mixed values are ours.
            return _convert_unknown(candidate, hint, path, value, source)
    raise _mistyped(value, hint, path, source, str(refusal)) from refusal


def _means_none(value: Any) -> bool:
    text = value.text if isinstance(value, Flag) else value
    return value is None or (isinstance(text, str) and text.lower() == "none")


def _flagless(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_flagless(inner) for inner in value.values())
    return not isinstance(value, Flag) and not (isinstance(value, list) and not all(map(_flagless, value)))


def _convert_other(hint: Any, value: Any) -> Any:
    """msgspec asks here about classes that it does not know."""
    if isinstance(value, hint):
        return value
    if issubclass(hint, PurePath) and isinstance(value, str):
        return hint(value)
    raise ValueError(f"Expected `{hint.__name__}`, got `{type(value).__name__}`")


def _convert_unknown(candidate: Any, hint: Any, path: Path, value: Any, source: Source) -> Any:
    """A hint that cannot be checked leaves the value as it is: the component will judge it."""
    for member in members_of(hint):
        if isinstance(member, type) and issubclass(member, enum.Enum):
            found = [choice for choice in member if candidate in (choice, choice.value)]
            if found:
                return found[0]
    if choices_of(hint):
        raise _mistyped(value, hint, path, source, "")
    return candidate


def _mistyped(value: Any, hint: Any, path: Path, source: Source, detail: str) -> ConfigError:
    given = value.text if isinstance(value, Flag) and isinstance(value.value, str) else plain(value)
    try:
        shown = toml_value(given) if given is not None else "none"
    except TypeError:
        shown = repr(given)
    shown = shown if len(shown) <= SHOWN_MAX else f"{shown[:SHOWN_MAX]}... ({len(shown)} characters)"
    inside = detail.partition(" - at `$")[2].rstrip("`").lstrip(".")
    hint_of_inside = f" ({detail.partition(' - at ')[0]} at {inside})" if inside else ""
    message = f"{where(path, value, source)}: expected {describe_type(hint)}; got {shown}{hint_of_inside}"
    choices = [str(choice) for choice in choices_of(hint)]
    near = near_misses(str(given), choices)
    if near:
        message += f"\ndid you mean: {', '.join(near)}?"
    elif isinstance(value, Flag):
        example = _example(hint)
        message += f"\nfor example: {flag_name(path)} {example}" if example else ""
    return ConfigError(message)


def _example(hint: Any) -> str:
    """A value that would be right, as it is typed in a shell; empty where no example is at hand."""
    member = members_of(hint)[0]
    origin = typing.get_origin(member) or member
    examples = {int: "3", float: "0.5", bool: "true", dict: "'{ key = 1 }'"}
    if origin in (list, tuple, set):
        inner = next(iter(typing.get_args(member)), str)
        return "'[1, 2]'" if inner in (int, float) else '\'["a", "b"]\''
    return examples.get(origin, "") if isinstance(origin, type) else ""


def unknown_key(path: Path, value: Any, source: Source, what: str, known: Iterable[str], listing: str) -> ConfigError:
    """The error for a key that nothing reads: `what` owns the `known` keys, which `listing` describes."""
    near = near_misses(path[-1], known)
    message = f"{where(path, value, source)}: {what} has no setting {path[-1]!r}"
    if near:
        is_flag = where(path, value, source).startswith("--")
        written = [flag_name((*path[:-1], name)) if is_flag else name for name in near]
        message += f"\ndid you mean: {', '.join(written)}?"
    return ConfigError(f"{message}\nits settings: {listing or 'none'}")


def _check_keys(value: Any, hint: Any, path: Path, source: Source) -> None:
    """Refuse keys that a table's type does not have, at every depth (msgspec would drop them for a dataclass)."""
    for member in members_of(hint):
        if isinstance(value, dict):
            known = _record_fields(member)
            if known is None:
                inner = typing.get_args(member)[1] if len(typing.get_args(member)) == 2 else Any
                for key, each in value.items():
                    _check_keys(each, inner, (*path, str(key)), source)
                continue
            for key, each in value.items():
                if key not in known:
                    listing = ", ".join(f"{name} ({describe_type(kind)})" for name, kind in known.items())
                    raise unknown_key((*path, key), each, source, member.__name__, known, listing)
                _check_keys(each, known[key], (*path, key), source)
        elif isinstance(value, list) and typing.get_args(member):
            for each in value:
                _check_keys(each, typing.get_args(member)[0], path, source)


def _record_fields(hint: Any) -> dict[str, Any] | None:
    """The fields of a dataclass, Struct, NamedTuple or TypedDict with their types; None for any other type."""
    if not isinstance(hint, type):
        return None
    if dataclasses.is_dataclass(hint):
        names = [field.name for field in dataclasses.fields(hint) if field.init]
    elif typing.is_typeddict(hint):
        names = list(hint.__annotations__)
    elif issubclass(hint, msgspec.Struct):
        names = list(hint.__struct_fields__)
    else:
        return None
    try:
        hints = typing.get_type_hints(hint)
    except NameError:  # a type under TYPE_CHECKING: the names are still right
        hints = {}
    return {name: hints.get(name, Any) for name in names}


def convert_settings(
    signature: Signature, given: Mapping[str, Any], label: str, source: Source = NOWHERE, path: Path = ()
) -> dict[str, Any]:
    """A component's settings, converted by its signature; what was not given is left to the component's defaults.

    `label` names the component in messages ("environment calculator"); `path` is where its settings stand (("env",) or
    ("reward", alias)). Raises ConfigError for an unknown setting, a mistyped one, and a missing one without default.
    """
    from rollouts.plugins.signature import REQUIRED

    known = {setting.name: setting for setting in signature.settings}
    for key, value in given.items():
        if key not in known:
            listing = ", ".join(_listed(setting) for setting in signature.settings)
            raise unknown_key((*path, key), value, source, label, known, listing)
    missing = [name for name, setting in known.items() if setting.default is REQUIRED and name not in given]
    if missing:
        table = ".".join(path)
        raise ConfigError(
            f"{label} needs {', '.join(f'`{name}` ({describe_type(known[name].type)})' for name in missing)}\n"
            f"type: {' '.join(f'{flag_name((*path, name))} VALUE' for name in missing)}"
            + (f", or write it under [{table}] in the file" if table else "")
        )
    return {key: convert_value(value, known[key].type, (*path, key), source) for key, value in given.items()}


def _listed(setting: Setting) -> str:
    from rollouts.plugins.signature import REQUIRED

    if setting.default is REQUIRED:
        return f"{setting.name} ({describe_type(setting.type)}; no default)"
    return f"{setting.name} ({describe_type(setting.type)}; default {default_text(setting.default)})"


def default_text(default: Any) -> str:
    """A default as a file would write it, or as Python shows it where no file could."""
    try:
        return "none" if default is None else toml_value(default)
    except TypeError:
        return repr(default)


def complete_settings(signature: Signature, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with every default filled in, in the signature's order: what a resolved file holds.

    A default that no file could hold, or that a file would leave out as a secret, is left out, which means it.
    """
    from rollouts.plugins.signature import REQUIRED

    complete: dict[str, Any] = {}
    for setting in signature.settings:
        if setting.name in settings:
            complete[setting.name] = settings[setting.name]
        elif setting.default is not REQUIRED and not is_secret(setting.name):
            try:
                toml_value(setting.default)
            except TypeError:
                continue
            complete[setting.name] = setting.default
    return complete
