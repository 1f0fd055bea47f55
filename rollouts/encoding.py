"""Encode any value as JSON for the files of a run. The encoder never raises.

    encode({"answer": 10**5000})    ->    {"answer": "<replaced: an integer of 16610 bits>"}

Values that JSON cannot represent are replaced by text that says so: integers with more digits than Python reads back,
objects that contain themselves or are nested deeper than `DEPTH_MAX`, objects whose `str` raises. A lone surrogate is
replaced by its escape. NaN and infinities become null. Any other object becomes its `str`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from rollouts.author_code import authors_code, printable

DEPTH_MAX = 100  # every JSON parser can read this depth
DIGITS_MAX = 4300  # Python's own limit on reading an integer


def encode(value: Any) -> bytes:
    """The value as JSON, in one line.

    >>> encode({"text": "caf\\ud800", "answer": 10**5000})
    b'{"text":"caf\\\\\\\\ud800","answer":"<replaced: an integer of 16610 bits>"}'
    """
    try:
        with authors_code():
            return msgspec.json.encode(value, enc_hook=_words)
    except Exception:  # some object inside raised; `plain_json` encodes each object by itself
        return msgspec.json.encode(plain_json(value))


def encode_indented(value: Any) -> str:
    """The value as indented JSON for people, with a newline at its end."""
    return msgspec.json.format(encode(value), indent=2).decode() + "\n"


def plain_json(value: Any) -> Any:
    """The value as dicts, lists, text and numbers, with values that JSON cannot represent replaced."""
    return _plain(value, ())


def _plain(value: Any, around: tuple[int, ...]) -> Any:
    """Like `plain_json`. `around` are the `id()` of the containers around this value, to find cycles."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int):
        return _integer(int.__int__(value))
    if id(value) in around:
        return f"<replaced: the same {type(value).__name__} again, which contains itself>"
    if len(around) >= DEPTH_MAX:
        return f"<replaced: a {type(value).__name__} nested deeper than {DEPTH_MAX}>"
    try:
        with authors_code():
            return _container(value, (*around, id(value)))
    except Exception as error:  # a container class of an author may raise anything when it is read
        return f"<replaced: a {type(value).__name__}, which raised {type(error).__name__} when it was read>"


def _container(value: Any, around: tuple[int, ...]) -> Any:
    if isinstance(value, Mapping):
        return {_key(key): _plain(each, around) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each, around) for each in value]
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name), around) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name), around) for each in dataclasses.fields(value)}
    try:
        return msgspec.json.decode(msgspec.json.encode(value))  # bytes, dates, enums
    except (TypeError, ValueError):
        return _words(value)


def _key(key: Any) -> str:
    if isinstance(key, str):
        return printable(key)
    return str(_integer(int.__int__(key))) if isinstance(key, int) else _words(key)


def _integer(value: int) -> int | str:
    if value.bit_length() > 3 * DIGITS_MAX and abs(value) >= 10**DIGITS_MAX:
        return f"<replaced: an integer of {value.bit_length()} bits>"
    return value


def _words(value: Any) -> str:
    """The `str` of an object; if it raises, text that says so."""
    try:
        with authors_code():
            return printable(str(value))
    except Exception as error:  # any class may raise anything
        return f"<replaced: a {type(value).__name__} whose str raised {type(error).__name__}>"
