"""Convert values to the types of settings (with msgspec), and describe values and types in words.

Errors say where the value was given and what was expected. Values in files are strict: a whole number is not accepted
as text, and 3.0 is not accepted as a whole number. Flags are parsed as TOML; for a setting whose type is text, the text
of the flag is its value. TOML has no null: if a setting allows None, `none` means None.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import msgspec

from rollouts.config.files import NOWHERE, Source, refused, unknown_key
from rollouts.config.flags import Flag, flag_name
from rollouts.config.settings import Setting, is_secret, without_secrets
from rollouts.errors import ConfigError, suggestion

Path = tuple[str, ...]
SHOWN_MAX = 200  # characters of a wrong value that an error shows

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "none",
    Any: "anything",
    object: "anything",
}


def unflagged(value: Any) -> Any:
    """The value with every `Flag` in it replaced by its parsed value."""
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
    """Convert a value to a type. Raises ConfigError, which says where the value was given and what was expected."""
    if _means_none(value) and "none" in choices_of(hint):
        value = value.text if isinstance(value, Flag) else value
    elif _means_none(value) and admits_none(hint):
        return None
    if isinstance(value, PurePath) and str in union_members(hint):
        value = str(value)
    _check_keys(value, hint, path, source)
    texts = _map_flags(value, lambda flag: flag.text)
    refusal: Exception | None = None
    for candidate, strict in ((unflagged(value), True), (texts, isinstance(value, Flag) or texts == value)):
        try:
            return msgspec.convert(candidate, hint, strict=strict, dec_hook=_convert_other)
        except msgspec.ValidationError as error:
            refusal = refusal or error
        except (TypeError, NotImplementedError, NameError):
            # msgspec does not support this type, or a type inside it
            return _convert_unknown(candidate, hint, path, value, source)
    raise _mistyped(value, hint, path, source, str(refusal)) from refusal


def _means_none(value: Any) -> bool:
    text = value.text if isinstance(value, Flag) else value
    return value is None or (isinstance(text, str) and text.lower() == "none")


def _convert_other(hint: Any, value: Any) -> Any:
    """Convert to a class that msgspec does not support. Called by msgspec."""
    if isinstance(value, hint):
        return value
    if issubclass(hint, PurePath) and isinstance(value, str):
        return hint(value)
    raise ValueError(f"Expected `{hint.__name__}`, got `{type(value).__name__}`")


def _convert_unknown(candidate: Any, hint: Any, path: Path, value: Any, source: Source) -> Any:
    """Convert to a type that msgspec does not support. Without choices to check, return the value unchanged."""
    for member in union_members(hint):
        for choice in member if isinstance(member, type) and issubclass(member, enum.Enum) else ():
            if candidate in (choice, choice.value):
                return choice
    if choices_of(hint):
        raise _mistyped(value, hint, path, source, "")
    return candidate


def _mistyped(value: Any, hint: Any, path: Path, source: Source, detail: str) -> ConfigError:
    given = value.text if isinstance(value, Flag) and isinstance(value.value, str) else unflagged(value)
    hidden = without_secrets(given, path[-1])
    try:
        shown = toml_value(hidden) if hidden is not None else "none"
    except TypeError:
        shown = repr(hidden)
    shown = shown if len(shown) <= SHOWN_MAX else f"{shown[:SHOWN_MAX]}... ({len(shown)} characters)"
    inside = detail.partition(" - at `$")[2].rstrip("`").lstrip(".")
    hint_of_inside = f" ({detail.partition(' - at ')[0]} at {inside})" if inside else ""
    expected = f"expected {describe_type(hint)}; got {shown}{hint_of_inside}"
    near = suggestion(str(given), map(str, choices_of(hint)))
    if not near and (example := _example(hint)):
        is_quoted = example[0] in "[{"
        shell = f"{flag_name(path)} " + (f"'{example}'" if is_quoted else example)
        near = f"for example: {shell if isinstance(value, Flag) else f'{path[-1]} = {example}'}"
    return refused(path, value, source, expected, near)


def _example(hint: Any) -> str:
    """An example of a valid value; empty if there is none."""
    member = union_members(hint)[0]
    origin = typing.get_origin(member) or member
    if origin in (list, tuple, set):
        return "[1, 2]" if next(iter(typing.get_args(member)), str) in (int, float) else '["a", "b"]'
    examples = {int: "3", float: "0.5", bool: "true", dict: "{ key = 1 }"}
    return examples.get(origin, "") if isinstance(origin, type) else ""


def _check_keys(value: Any, hint: Any, path: Path, source: Source) -> None:
    """Raise ConfigError for unknown keys of a table, at every depth. For a dataclass, msgspec would ignore them."""
    for member in union_members(hint):
        arguments = typing.get_args(member)
        if isinstance(value, dict):
            known = _record_fields(member)
            for key, each in value.items():
                if known is not None and key not in known:
                    listing = ", ".join(f"{name} ({describe_type(kind)})" for name, kind in known.items())
                    problem = f"{member.__name__} has no setting {key!r}"
                    raise unknown_key((*path, key), each, source, problem, known, f"its settings: {listing or 'none'}")
                kind = (known or {}).get(key, arguments[1] if len(arguments) == 2 else Any)
                _check_keys(each, kind, (*path, str(key)), source)
        elif isinstance(value, list) and arguments:
            for each in value:
                _check_keys(each, arguments[0], path, source)


def _record_fields(hint: Any) -> dict[str, Any] | None:
    """The fields and their types of a dataclass, Struct or TypedDict; None for other types."""
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
    except NameError:  # a type under TYPE_CHECKING: use the names without types
        hints = {}
    return {name: hints.get(name, Any) for name in names}


def default_text(setting: Setting) -> str:
    """The default as TOML, or in Python's form if TOML cannot represent it; or "no default"."""
    if setting.is_required:
        return "no default"
    try:
        return f"default {'none' if setting.default is None else toml_value(setting.default)}"
    except TypeError:
        return f"default {setting.default!r}"


def default_fault(setting: Setting) -> str:
    """Why a settings file that holds the default would be refused: it does not fit the type hint; empty if it fits."""
    import tomllib

    if setting.is_required or is_secret(setting.name):
        return ""  # no settings file holds it
    try:
        text = toml_value(setting.default)
    except TypeError:
        return ""
    try:
        convert_value(tomllib.loads(f"x = {text}")["x"], setting.type, (setting.name,))
    except ConfigError:
        hint = re.sub(r"[\w.]+\.(?=[A-Za-z_])", "", inspect.formatannotation(setting.type))  # without modules
        return f"the default {text} is not {describe_type(setting.type)}, but its hint is {hint}"
    return ""


def toml_key(key: str) -> str:
    """A key as TOML, in quotes if it needs them."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quoted(key)


def _quoted(text: str) -> str:
    # JSON's escapes are valid in TOML. TOML also requires an escape for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(value: Any) -> str:
    """A value as TOML in one line. Raises TypeError if TOML cannot represent the value, such as None inside a list.

    >>> toml_value({"a": (1, 2.5), "b": "x"}), toml_value(None)
    ('{ a = [1, 2.5], b = "x" }', '"none"')
    """
    return '"none"' if value is None else _toml(value)


def _toml(value: Any) -> str:
    if isinstance(value, Flag | enum.Enum):
        return toml_value(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | PurePath):
        return _quoted(str(value))
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list | tuple | set | frozenset):
        items = [_toml(item) for item in value]
        return "[" + ", ".join(sorted(items) if isinstance(value, set | frozenset) else items) + "]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{toml_key(str(key))} = {_toml(item)}" for key, item in value.items())
        return "{ " + inner + " }" if inner else "{}"
    fields = getattr(value, "__dataclass_fields__", getattr(value, "__struct_fields__", None))
    if fields is not None and not isinstance(value, type):
        return _toml({name: getattr(value, name) for name in fields})
    raise TypeError(f"TOML cannot hold {value!r}")


def union_members(hint: Any) -> tuple[Any, ...]:
    """The member types of a union, without `Annotated`. Any other type is its own only member."""
    if typing.get_origin(hint) is typing.Annotated:
        return union_members(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(inner for member in typing.get_args(hint) for inner in union_members(member))
    return (hint,)


def admits_none(hint: Any) -> bool:
    """Whether the type allows None."""
    return any(
        member in (None, type(None), Any, object)
        or (typing.get_origin(member) is typing.Literal and None in typing.get_args(member))
        for member in union_members(hint)
    )


def choices_of(hint: Any) -> list[Any]:
    """The allowed values of a `Literal` or enum, without None; empty if the type also allows other values."""
    found: list[Any] = []
    for member in union_members(hint):
        if typing.get_origin(member) is typing.Literal:
            found += [choice for choice in typing.get_args(member) if choice is not None]
        elif isinstance(member, type) and issubclass(member, enum.Enum):
            found += [choice.value for choice in member]
        elif member not in (None, type(None)):
            return []
    return found


def describe_type(hint: Any) -> str:
    """A type in plain words.

    >>> describe_type(int | None), describe_type(list[str])
    ('a whole number or none', 'a list of text')
    >>> describe_type(typing.Annotated[float, msgspec.Meta(ge=0, lt=1)])
    'a number (0 or more, below 1)'
    """
    choices = choices_of(hint)
    if choices:
        words = [str(choice) for choice in choices] + (["none"] if admits_none(hint) else [])
        return "one of: " + ", ".join(words)
    return " or ".join(dict.fromkeys(map(_describe_member, union_members(hint)))) + _describe_bounds(hint)


def _describe_bounds(hint: Any) -> str:
    """The bounds of a type such as `Annotated[float, msgspec.Meta(ge=0)]`, in words."""
    metas = [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
    words = {"gt": "above {}", "ge": "{} or more", "lt": "below {}", "le": "{} or less"}
    bounds = [(words[name], getattr(meta, name)) for meta in metas for name in words]
    found = [word.format(bound) for word, bound in bounds if bound is not None]
    return f" ({', '.join(found)})" if found else ""


def _describe_member(hint: Any) -> str:
    if hint is None:
        return "none"
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    try:
        if hint in _WORDS:
            return _WORDS[hint]
    except TypeError:  # an annotation that cannot be hashed
        return str(hint)
    if origin is typing.Literal:
        return "one of: " + ", ".join(map(str, arguments))
    if not isinstance(origin, type):
        return str(hint).replace("typing.", "")
    if issubclass(origin, PurePath):
        return "a path"
    if issubclass(origin, Mapping) or typing.is_typeddict(origin) or dataclasses.is_dataclass(origin):
        return "a table"
    if origin in (list, tuple, set, frozenset) or (origin.__module__ == "collections.abc" and len(arguments) == 1):
        inner = [argument for argument in dict.fromkeys(arguments) if argument is not Ellipsis]
        return "a list" + (f" of {describe_type(inner[0])}" if len(inner) == 1 and inner[0] is not Any else "")
    return str(origin.__name__)
