"""The splits of a server, texts of what it answers, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.errors import ConfigError, in_lines, suggestion


class RefusedError(Exception):
    """The server refuses a request, or a call of a tool failed. `code` is that of its answer, if it has one."""

    def __init__(self, words: str, code: str = "") -> None:
        super().__init__(words)
        self.code = code


def split_name(known: Sequence[Mapping[str, Any]], given: str, split: str, flag: str) -> str:
    """The server's split for `train` or `eval`: the given one, else one of the type `train`, or of `test` or
    `validation`. Raises ConfigError.
    """
    names = [str(each.get("name")) for each in known]
    if given:
        if given in names:
            return given
        has = f"{flag} {given}: the server has the splits {', '.join(names)}"
        raise ConfigError(in_lines(has, suggestion(given, names)))
    types = ("train",) if split == "train" else ("test", "validation")
    for kind in types:
        found = [str(each["name"]) for each in known if kind in (each.get("name"), each.get("type"))]
        if found:
            return found[0]
    return names[0]


def as_text(value: Any) -> str:
    """What the model reads of data: a text as it is, and a dict with one text as this text; anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if each not in (None, "", {}, [])}
        if len(kept) == 1 and isinstance(only := next(iter(kept.values())), str):
            return only
        value = kept or value
    return json.dumps(value, ensure_ascii=False)


def text_of_blocks(blocks: Any) -> str:
    """The text of content blocks of MCP and ORS. What is no text becomes a note."""
    parts = []
    for block in blocks if isinstance(blocks, list) else []:
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            parts.append(block["text"])
        else:
            kind = block.get("type", "content") if isinstance(block, dict) else "content"
            parts.append(f"[{kind}, which cannot be shown as text]")
    return "\n".join(parts)
