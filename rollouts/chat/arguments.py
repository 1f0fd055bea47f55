"""The values of a tool's arguments: converted to the types of its JSON schema, or of its function.

Not here: schemas of functions, and arguments that do not fit (`rollouts.env.schema`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from types import GenericAlias, MappingProxyType, NoneType
from typing import Any, Literal, Union

import msgspec


def typed_arguments(
    schema: Any, arguments: Mapping[str, Any], words: Mapping[str, bool | None] = MappingProxyType({})
) -> dict[str, Any]:
    """The arguments, in which a text has the type that a tool's JSON schema gives it. A text that the schema allows, or
    that does not fit, stays as it is. `words` are texts that stand for a value, if the schema allows this value.

    >>> typed_arguments({"properties": {"a": {"type": "integer"}}}, {"a": "3", "b": "3"})
    {'a': 3, 'b': '3'}
    """
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return dict(arguments)
    return {
        key: _typed(value, properties[key], words) if isinstance(value, str) and key in properties else value
        for key, value in arguments.items()
    }


def _typed(text: str, schema: Any, words: Mapping[str, bool | None]) -> Any:
    try:
        hint = _encoded_hint(msgspec.json.encode(schema))
        if text in words:
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.convert(words[text], hint)
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(text, hint)
        value = converted_argument(text, hint)
        return text if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no such number
    except (ValueError, TypeError, RecursionError):  # it does not fit, or a client's schema is none
        return text


@functools.lru_cache(maxsize=1024)
def _encoded_hint(schema: bytes) -> Any:
    return hint_of_schema(msgspec.json.decode(schema))


def converted_argument(value: Any, hint: Any) -> Any:
    """The value as its type. A text that does not fit may be a list or an object as JSON, or a template's None: XML
    formats of calls have only text.
    """
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError:
        if value == "None":
            return msgspec.convert(None, hint)
        if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
            raise
        try:
            data = msgspec.json.decode(value)
        except msgspec.DecodeError:
            data = value
        return msgspec.convert(data, hint, strict=False)


def hint_of_schema(schema: Any) -> Any:
    """The type of the values that a JSON schema describes, as far as it is simple. Any: it is not checked."""
    if not isinstance(schema, dict) or "$ref" in schema or "allOf" in schema:
        return Any
    choices, kinds = schema.get("enum"), schema.get("type")
    options = schema.get("anyOf") or schema.get("oneOf")
    found: list[Any]
    if isinstance(choices, list) and choices:
        found = [Literal[tuple(choices)] if {type(each) for each in choices} <= {str, int, NoneType} else Any]
    elif isinstance(options, list):
        found = [hint_of_schema(option) for option in options]
    elif kinds == "array":
        found = [GenericAlias(list, (hint_of_schema(schema.get("items")),))]
    else:
        found = [_SIMPLE.get(str(kind), Any) for kind in (kinds if isinstance(kinds, list) else [kinds])]
    if Any in found or not found:
        return Any
    hint: Any = Union[tuple([*found, None] if schema.get("nullable") else found)]  # noqa: UP007
    try:
        msgspec.json.Decoder(hint)
    except TypeError:  # such as a union of two lists
        return Any
    return hint


_SIMPLE: Mapping[str, Any] = {
    "string": str, "integer": int, "number": int | float, "boolean": bool, "null": None, "array": list, "object": dict,
}  # fmt: skip
