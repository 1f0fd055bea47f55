"""Flags of the command line: taking off the dotted ones, and reading a value.

`--env.digits 3` and `--loss.clip-high=0.28` set a component's settings; they are removed before the command's own
parser sees the rest, so that every component's settings are flags without being declared anywhere. Dashes and
underscores are the same. What a value means is decided when its setting's type is known (rollouts.config.convert).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouts.config.settings import SINGLE
from rollouts.errors import ConfigError

Tree = dict[str, Any]
"""Nested settings: the core's at the top level, tables for components. Leaves of the command line are `Flag`."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DOTTED = re.compile(r"--(?P<path>[A-Za-z][\w-]*(?:\.[\w-]+)+)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Flag:
    """A value of the command line: what it reads as in TOML, and the text itself (for a setting that is text)."""

    text: str
    value: Any = field(hash=False)


def read_flag(text: str) -> Flag:
    """Read a flag's value as a TOML value, else as text; `none` is None.

    >>> read_flag("3").value, read_flag("[1, 2]").value, read_flag("a b").value, read_flag("none").value
    (3, [1, 2], 'a b', None)
    """
    if text.lower() == "none":
        return Flag(text, None)
    if text.lower() in ("true", "false"):
        return Flag(text, text.lower() == "true")
    import tomllib

    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, a number of thousands of digits, nested too deep
        # TOML wants `0.5` and `7`; people also type `.5` and `007`.
        if _NUMBER.fullmatch(text) and len(text) < 100:
            return Flag(text, int(text) if text.lstrip("+-").isdigit() else float(text))
        return Flag(text, text)
    return Flag(text, read["value"] if read.keys() == {"value"} else text)


def flag_name(path: Sequence[str]) -> str:
    """The flag that sets what lies at a path.

    >>> flag_name(("loss", "clip_high"))
    '--loss.clip-high'
    """
    return "--" + ".".join(path).replace("_", "-")


def take_dotted_flags(argv: Sequence[str]) -> tuple[list[str], Tree]:
    """Split the arguments: those without dotted flags, and what the dotted flags say, as a tree of `Flag`.

    What names a component of the table `sft` leaves room for its settings (`--sft.env a --sft.env.b 2`), as `--env a`
    does. A bare `--` ends the flags. A flag given twice counts the last time. Raises ConfigError for a flag without a
    value and for one that contradicts another (`--env.a 1 --env.a.b 2`).
    """
    rest: list[str] = []
    tree: Tree = {}
    arguments = iter(enumerate(argv))
    for index, argument in arguments:
        if argument == "--":
            return rest + list(argv[index:]), tree
        match = _DOTTED.fullmatch(argument)
        if match is None:
            rest.append(argument)
            continue
        text = match["value"]
        if text is None:
            text = argv[index + 1] if index + 1 < len(argv) else "--"
            if text.startswith("--"):
                flag = f"--{match['path']}"
                raise ConfigError(
                    f"{flag} needs a value, and none follows it\ntype `{flag} VALUE` (`true` or `false` for a switch); "
                    f"a value that begins with two dashes is written `{flag}=--value`"
                )
            next(arguments)
        path = tuple(match["path"].replace("-", "_").split("."))
        is_named = path[0] == "sft" and len(path) == 2 and path[1] in SINGLE
        _insert(tree, (*path, "name") if is_named else path, read_flag(text))
    return rest, tree


def _insert(tree: Tree, path: tuple[str, ...], flag: Flag) -> None:
    """Put a flag into the tree that is being built."""
    for depth, key in enumerate(path[:-1], start=1):
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{flag_name(path)} contradicts {flag_name(path[:depth])}, which gives a plain value")
    if isinstance(tree.get(path[-1]), dict):
        raise ConfigError(f"{flag_name(path)} gives a plain value, and another flag sets something inside it")
    tree[path[-1]] = flag
