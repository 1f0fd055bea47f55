"""Tools that another system describes: their names and argument schemas as chat formats and the core take them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

NAME_CHARACTERS_MAX = 64
DEPTH_MAX = 24  # of references; a deeper one, as in a type that contains itself, is left open
_COMBINED = ("anyOf", "oneOf", "allOf", "if", "dependentSchemas", "patternProperties")


def plain_names(names: Iterable[str], prefix: str = "") -> dict[str, str]:
    """The name that the model sees for each name of the server: letters, digits, `_` and `-`, at most 64 of them, and
    each another one. The keys keep their order.

    >>> plain_names(["files/read", "files.read", "größe"], "my_")
    {'files/read': 'my_files_read', 'files.read': 'my_files_read_2', 'größe': 'my_gr__e'}
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", prefix + name)[:NAME_CHARACTERS_MAX] or "_"
        free, number = plain, 1
        while free in found.values():
            number += 1
            free = f"{plain[: NAME_CHARACTERS_MAX - 1 - len(str(number))]}_{number}"
        found[name] = free
    return found


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments without references, as the schema of an object.

    If the root combines schemas (`anyOf` and the like), arguments that it does not name itself are accepted too. A
    reference that cannot be resolved, and one to a type that contains itself, leave the value open.

    >>> plain_schema({"$defs": {"Unit": {"enum": ["C", "F"]}}, "properties": {"unit": {"$ref": "#/$defs/Unit"}}})
    {'properties': {'unit': {'enum': ['C', 'F']}}, 'type': 'object', 'required': []}
    """
    inlined = _inlined(schema, schema, ())
    found = {key: value for key, value in inlined.items() if key not in ("$defs", "definitions", "$schema", "$id")}
    properties = found.get("properties")
    found["properties"] = properties if isinstance(properties, dict) else {}
    found["type"] = "object"
    required = found.get("required")
    found["required"] = [name for name in required if name in found["properties"]] if isinstance(required, list) else []
    if any(key in found for key in _COMBINED):
        found.setdefault("additionalProperties", True)
    return found


def _inlined(value: Any, root: Mapping[str, Any], seen: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_inlined(each, root, seen) for each in value]
    if not isinstance(value, Mapping):
        return value
    reference = value.get("$ref")
    rest = {key: _inlined(each, root, seen) for key, each in value.items() if key not in ("$ref", "$defs")}
    if not isinstance(reference, str):
        return rest if reference is None else {**rest, "$ref": _inlined(reference, root, seen)}
    if reference in seen or len(seen) == DEPTH_MAX:
        return rest
    return {**_inlined(_resolved(reference, root), root, (*seen, reference)), **rest}


def _resolved(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference into the same document names; an open one if there is none."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if reference.startswith("#/") and isinstance(found, Mapping) else {}
