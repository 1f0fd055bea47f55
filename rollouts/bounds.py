"""The bounds of what others write: replies of a model, requests of an agent, rows of data, restored checkpoints.

Each is checked once, where it is read, and before it is rendered, encoded or compared. So nothing behind this check
recurses deeper than `DEPTH_MAX`, and the time and memory of one request are bounded. Not here: how many tokens a
model's context holds, and how long a tool's result may be, which are settings of a run.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollouts.types import ToolCall

DEPTH_MAX = 64
"""The levels of lists and tables in a tool call, a tool's schema, a message or a row."""

BODY_BYTES_MAX = 16 << 20
"""The body of one request: four times the text of a context of a million tokens."""

BODIES_BYTES_MAX = 4 * BODY_BYTES_MAX
"""The bodies that one server holds at the same time, of requests that arrive or wait for their answer."""

MESSAGES_MAX = 10_000
TOOLS_MAX = 1_000
STOPS_MAX = 64
"""The messages, tools and stop texts of one request."""

ROW_CHARACTERS_MAX = 4 << 20
"""The text of one row of data: that of a context of a million tokens."""

CHARACTERS_PER_TOKEN_MAX = 16
"""No whole context has more characters per token. Some tokens do: a line of `=`, or deep indentation."""


def excess(value: Any, characters_max: float = math.inf) -> str:
    """What is too much in plain data, or is not text, in words; empty if nothing is. `characters_max` bounds its text.

    >>> excess({"a": [1, 2]}), excess(msgspec.json.decode("[" * 65 + "]" * 65))
    ('', 'nested more than 64 levels deep')
    >>> excess([["abc"], {"d": "e"}], 3)
    'longer than 3 characters'
    """
    with contextlib.suppress(Exception):  # an object that JSON cannot represent, or one that is nested too deep
        try:
            encoded = msgspec.json.encode(value)
        except UnicodeEncodeError:
            return r"not valid Unicode: it has half of a surrogate pair, such as \ud800"
        if len(encoded) <= characters_max:  # as most rows and calls, in a tenth of the time
            return f"nested more than {DEPTH_MAX} levels deep" if _is_deep(encoded) else ""
    level, length = [value], 0
    for _ in range(DEPTH_MAX):
        parts = [each for around in level for each in _parts(around)]
        length += sum(len(each) for each in parts if type(each) is str)
        if length > characters_max:
            return f"longer than {characters_max} characters"
        # By identity, so that a list that many others share counts once.
        level = list({id(each): each for each in parts if type(each) not in _SCALARS}.values())
        if not level:
            return ""
    return f"nested more than {DEPTH_MAX} levels deep"


def bounded_call(call: ToolCall) -> ToolCall:
    """The call; if its arguments are nested too deep, a malformed call that says so."""
    problem = excess(call.arguments)
    return ToolCall(call.name, {}, call.id, f"its arguments are {problem}") if problem else call


def _with_single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):  # JSON parsers keep the last one without a word
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return table


CALL_JSON = json.JSONDecoder(object_pairs_hook=_with_single_keys)
"""Reads JSON of a call. A key that is there twice is a ValueError."""


def call_arguments(raw: Any) -> dict[str, Any] | str:
    """The arguments of a call as a chat API, a data set or a model writes them: a table, or its JSON text. Absent, null
    and "" mean no arguments. If they are none of these: the reason, as text for the model.

    >>> call_arguments('{"a": 1}'), call_arguments(""), call_arguments(None)
    ({'a': 1}, {}, {})
    >>> call_arguments("[1]")
    '"arguments" must be a JSON object'
    """
    if isinstance(raw, str):
        try:
            raw = CALL_JSON.decode(raw) if raw.strip() else None
        except (ValueError, RecursionError) as error:
            return f'"arguments" is not a JSON object: {error}'
    if raw is None or raw == "":
        return {}
    if not isinstance(raw, dict | Mapping):
        return '"arguments" must be a JSON object'
    problem = excess(raw)
    return f'"arguments" is {problem}' if problem else dict(raw)


_JSON_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def _is_deep(encoded: bytes) -> bool:
    """Whether JSON has more than `DEPTH_MAX` levels. Each turn removes the innermost one."""
    if encoded.count(b"[") + encoded.count(b"{") <= DEPTH_MAX:
        return False
    brackets = _JSON_TEXT.sub(b"", encoded).translate(_BRACKETS, _OTHERS)
    for _ in range(DEPTH_MAX):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


_SCALARS = frozenset({str, int, float, bool, type(None)})


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, msgspec.Struct):
        return [getattr(value, name) for name in value.__struct_fields__]
    return value.values() if isinstance(value, Mapping) else ()
