"""Parse the dotted flags of the command line.

`--env.digits 3` and `--loss.clip-high=0.28` set settings of components. They are removed before click parses the other
flags, because click does not know the settings of components. Dashes equal underscores. `rollouts.config.convert`
converts the values later, when the types of the settings are known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouts.config.settings import FLAGS, SINGLE
from rollouts.errors import ConfigError

Tree = dict[str, Any]
"""Nested settings: those of the core at the top level, and a table for each component. A flag's value is a `Flag`."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DOTTED = re.compile(r"--(?P<path>[A-Za-z][\w-]*(?:\.[\w-]+)+)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Flag:
    """The value of a flag: parsed as TOML, and as text for a setting whose type is text."""

    text: str
    value: Any = field(hash=False)


def read_flag(text: str) -> Flag:
    """Parse the value of a flag as TOML, else as text. `none` becomes None.

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
    except (ValueError, RecursionError):  # not TOML, too many digits, or nested too deep
        # numbers that TOML refuses, such as `.5` and `007`
        if _NUMBER.fullmatch(text) and len(text) < 100:
            return Flag(text, int(text) if text.lstrip("+-").isdigit() else float(text))
        return Flag(text, text)
    return Flag(text, read["value"] if read.keys() == {"value"} else text)


def flag_name(path: Sequence[str]) -> str:
    """The flag that sets the value at a path.

    >>> flag_name(("loss", "clip_high"))
    '--loss.clip-high'
    """
    return FLAGS.get(path[0], "--" + ".".join(path).replace("_", "-"))


def take_dotted_flags(argv: Sequence[str]) -> tuple[list[str], Tree]:
    """Split the arguments into those without dotted flags, and a tree of the dotted flags' values.

    `--sft.env a` names a component, so `--sft.env.b 2` can follow. A bare `--` ends the flags. If a flag is repeated,
    the last value counts. Raises ConfigError for a flag without a value, and for flags that contradict each other
    (`--env.a 1 --env.a.b 2`).
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
                    f"{flag} needs a value\ntype: {flag} VALUE (for a switch, `true` or `false`; for a value that "
                    f"begins with two dashes, {flag}=--value)"
                )
            next(arguments)
        path = tuple(match["path"].replace("-", "_").split("."))
        is_named = path[0] == "sft" and len(path) == 2 and path[1] in SINGLE
        _insert(tree, (*path, "name") if is_named else path, read_flag(text))
    return rest, tree


def _insert(tree: Tree, path: tuple[str, ...], flag: Flag) -> None:
    """Put a flag into the tree."""
    for depth, key in enumerate(path[:-1], start=1):
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{flag_name(path)} contradicts {flag_name(path[:depth])}, which sets a plain value")
    if isinstance(tree.get(path[-1]), dict):
        raise ConfigError(f"{flag_name(path)} sets a plain value, but another flag sets a value inside it")
    tree[path[-1]] = flag
