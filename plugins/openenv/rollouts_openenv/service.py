"""The splits and tasks that a server offers, and texts of what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts import Task
from rollouts.errors import ConfigError, EnvironmentDefinitionError, near_misses


def split_name(known: Sequence[Mapping[str, Any]], given: str, split: str, flag: str) -> str:
    """The server's split for `train` or `eval`: the given one, else one of the type `train`, or of `test` or
    `validation`. Raises ConfigError.
    """
    names = [str(each.get("name")) for each in known]
    if given:
        if given in names:
            return given
        near = "".join(f"\ndid you mean: {each}?" for each in near_misses(given, names)[:1])
        raise ConfigError(f"{flag} {given}: the server has the splits {', '.join(names)}{near}")
    types = ("train",) if split == "train" else ("test", "validation")
    for kind in types:
        found = [str(each["name"]) for each in known if kind in (each.get("name"), each.get("type"))]
        if found:
            return found[0]
    return names[0]


def numbered_tasks(name: str, split: str, count: Any, prompt: str) -> list[Task]:
    """A task for each of the server's tasks in a split."""
    if not isinstance(count, int) or count < 1:
        raise EnvironmentDefinitionError(f"the server says that the split {split} of {name} has {count!r} tasks")
    return [Task(prompt, info={"split": split, "index": index}, id=f"{name}/{split}/{index}") for index in range(count)]


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
