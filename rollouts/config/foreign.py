"""What to type for the names that other programs have for settings and commands. The names are in `foreign.toml`."""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path


@functools.cache
def ours_by_name(section: str) -> dict[str, str]:
    """What a section of `foreign.toml` answers to each name of another program."""
    import tomllib

    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[section]
    return {name: ours for ours, names in table.items() for name in names.split()}


def foreign_hint(name: str, known: Collection[str] = ()) -> str:
    """A line for an error: the flag of rollouts for the name of another library's setting; empty for other names. If
    `known` flags of the command are given, also empty for a flag that is not among them.

    >>> foreign_hint("--num-generations")
    'in rollouts this is: --samples-per-prompt'
    >>> foreign_hint("--steps")
    ''
    """
    name = name.lstrip("-").replace("-", "_").lower()
    ours = ours_by_name("settings").get(name, "")
    flag = ours.partition(" ")[0].partition(".")[0]
    is_known = not known or flag in known or flag == "rollouts"
    return f"in rollouts this is: {ours}" if ours and is_known else ours_by_name("reasons").get(name, "")


def command_hint(name: str) -> str:
    """A line for an error: the command of rollouts for the name of another program's command; empty for other names.

    >>> command_hint("train")
    'in rollouts this is: rollouts run'
    """
    ours = ours_by_name("commands").get(name.lower())
    return f"in rollouts this is: {ours}" if ours else ""


def misplaced_hint(name: str, core: Collection[str]) -> str:
    """A line for an error about a setting that a component does not have, if it is a setting of the run (one of `core`)
    or the name of another library's setting. Empty for other names.

    >>> misplaced_hint("lr", ["lr"])
    '`lr` is a setting of the run itself: type --lr VALUE, or write it above the first table of the file'
    """
    how = f"type --{name.replace('_', '-')} VALUE, or write it above the first table of the file"
    return f"`{name}` is a setting of the run itself: {how}" if name in core else foreign_hint(name)
