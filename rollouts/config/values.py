"""Values and types in words: TOML text of a value, and what a person would call a type.

Used by messages and by rendering. TOML has no null; `none` in quotes is read back as None wherever a setting admits it.
"""

from __future__ import annotations

import datetime
import enum
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import PurePath
from typing import Any

from rollouts.config.flags import Flag

__all__ = ["admits_none", "choices_of", "describe_type", "members_of", "toml_key", "toml_value"]

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "none",
    Any: "anything",
    object: "anything",
}


def toml_key(key: str) -> str:
    """A key, in quotes where it needs them."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quoted(key)


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(value: Any) -> str:
    """A value as TOML in one line. Raises TypeError for what TOML cannot hold, such as None inside a list.

    >>> toml_value({"a": (1, 2.5), "b": "x"}), toml_value(None)
    ('{ a = [1, 2.5], b = "x" }', '"none"')
    """
    return '"none"' if value is None else _toml(value)


def _toml(value: Any) -> str:
    if isinstance(value, Flag):
        return toml_value(value.value)
    if isinstance(value, enum.Enum):
        return _toml(value.value)
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
    if is_dataclass(value) and not isinstance(value, type):
        return _toml({name: getattr(value, name) for name in type(value).__dataclass_fields__})
    if hasattr(value, "__struct_fields__"):
        return _toml({name: getattr(value, name) for name in value.__struct_fields__})
    raise TypeError(f"TOML cannot hold {value!r}")


def members_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union (one for anything else), `Annotated` taken off."""
    if typing.get_origin(hint) is typing.Annotated:
        return members_of(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(inner for member in typing.get_args(hint) for inner in members_of(member))
    return (hint,)


def admits_none(hint: Any) -> bool:
    """Whether None is a value of that type."""
    return any(
        member in (None, type(None), Any, object)
        or (typing.get_origin(member) is typing.Literal and None in typing.get_args(member))
        for member in members_of(hint)
    )


def choices_of(hint: Any) -> list[Any]:
    """The values of a choice: of `Literal` and enums. None is left out; empty where anything else is possible too."""
    found: list[Any] = []
    for member in members_of(hint):
        if typing.get_origin(member) is typing.Literal:
            found += [choice for choice in typing.get_args(member) if choice is not None]
        elif isinstance(member, type) and issubclass(member, enum.Enum):
            found += [choice.value for choice in member]
        elif member not in (None, type(None)):
            return []
    return found


def describe_type(hint: Any) -> str:
    """A type in a person's words.

    >>> describe_type(int | None), describe_type(list[str])
    ('a whole number or none', 'a list of text')
    """
    choices = choices_of(hint)
    if choices:
        words = [str(choice) for choice in choices] + (["none"] if admits_none(hint) else [])
        return "one of: " + ", ".join(words)
    return " or ".join(dict.fromkeys(_describe_member(member) for member in members_of(hint)))


def _describe_member(hint: Any) -> str:
    if hint is None:
        return "none"
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    try:
        if hint in _WORDS:
            return _WORDS[hint]
    except TypeError:  # an annotation that cannot be hashed is named below
        return str(hint)
    if origin is typing.Literal:
        return "one of: " + ", ".join(map(str, arguments))
    if not isinstance(origin, type):
        return str(hint).replace("typing.", "")
    if issubclass(origin, PurePath):
        return "a path"
    if issubclass(origin, Mapping) or typing.is_typeddict(origin) or is_dataclass(origin):
        return "a table"
    if origin in (list, tuple, set, frozenset) or (origin.__module__ == "collections.abc" and len(arguments) == 1):
        inner = [argument for argument in dict.fromkeys(arguments) if argument is not Ellipsis]
        return "a list" + (f" of {describe_type(inner[0])}" if len(inner) == 1 and inner[0] is not Any else "")
    return str(origin.__name__)
