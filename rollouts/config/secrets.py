"""Keep the secrets of components (`--inference.body.api-key sk-1`) out of all files.

Whether a setting is a secret depends on its name (`is_secret`), at any depth. LEFT_OUT is written in place of a secret.
A run from such a file ends with an error that names the missing secret. No setting of the core is a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.config.convert import toml_value
from rollouts.config.files import Source, refused, walk
from rollouts.config.flags import Flag, Tree, flag_name, read_flag
from rollouts.config.merging import Component, by_alias
from rollouts.config.settings import LEFT_OUT, MULTIPLE, is_secret, without_secrets


def tree_without_secrets(tree: Tree) -> Tree:
    """A copy of a tree of settings, of a run or of its table `sft`, with LEFT_OUT in place of every secret. An alias is
    not the name of a setting: the table `[reward.password]` is no secret.
    """

    def hidden(key: str, value: Any) -> Any:
        if key == "sft":
            return tree_without_secrets(value)
        if key == "schedule":
            return [tree_without_secrets(table) for table in value]
        if isinstance(value, Mapping) and by_alias(key, value):
            return {alias: without_secrets(table) for alias, table in value.items()}
        return without_secrets(value)

    return {key: hidden(key, value) for key, value in tree.items()}


def flat_without_secrets(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of settings by their dotted names, with LEFT_OUT in place of every secret."""
    hidden: dict[str, Any] = {}
    for name, value in flat.items():
        path = name.split(".")
        depth = _secret_depth(path)
        if depth is None:
            hidden[name] = tree_without_secrets({name: value})[name]
        else:
            whole = ".".join(path[:depth])
            hidden[whole] = LEFT_OUT if depth < len(path) else without_secrets(value, path[-1])
    return hidden


def _secret_depth(path: Sequence[str]) -> int | None:
    """The length of the part of a path that ends at the first secret; None if the path has no secret."""
    first = 1 + (path[0] == "sft")
    if len(path) > first + 1 and path[first - 1] in MULTIPLE:
        first += 1  # the alias
    return next((depth for depth in range(first + 1, len(path) + 1) if is_secret(path[depth - 1])), None)


def components_without_secrets(components: Sequence[Component]) -> list[Component]:
    """Copies of components, with LEFT_OUT in place of every secret."""
    return [
        each._replace(settings=without_secrets(each.settings), weight=without_secrets(each.weight))
        for each in components
    ]


def leaves_out(value: Any) -> bool:
    """Whether these settings contain LEFT_OUT."""
    return bool(_left_out({"": value}))


def refuse_left_out(tree: Tree, source: Source) -> None:
    """Raise ConfigError if the settings still contain LEFT_OUT in place of a secret."""
    missing = _left_out(tree)
    missing = [path for path in missing if path[0] != "sft" or path[1:] not in missing]
    flags = dict.fromkeys(f"{flag} VALUE" for path in missing if (flag := _flag_for(path)))
    again = f"type: {' '.join(flags)}" if flags else "write it into the file"
    for path in missing:
        raise refused(path, None, source, "this secret was left out when the file was written", again)


def with_secrets_of_run(tree: Tree) -> Tree:
    """The tree with every LEFT_OUT in its table `sft` replaced by the run's own secret."""
    if not isinstance(tree.get("sft"), Mapping):
        return tree
    return tree | {"sft": {key: _filled(value, tree.get(key)) for key, value in tree["sft"].items()}}


def _filled(value: Any, other: Any) -> Any:
    """`value` with each LEFT_OUT replaced by the value at the same place in `other`. Nothing is taken from a component
    with another name.
    """
    if isinstance(value, str) and value == LEFT_OUT:
        return value if other is None else other
    other = other.value if isinstance(other, Flag) else other
    if isinstance(value, Mapping) and isinstance(other, Mapping) and value.get("name") == other.get("name"):
        return {key: _filled(inner, other.get(key)) for key, inner in value.items()}
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        return [_filled(*pair) for pair in zip(value, other, strict=True)]
    return value


def _flag_for(path: Sequence[str]) -> str:
    """The flag that sets the value at this path; or the list or table around it, if no flag can set the value itself.
    Empty if no flag can.
    """
    named: list[str] = []
    for part in path:
        found = re.fullmatch(r"(\w+)(\[\d+\])?", part, re.ASCII)
        named += [found[1]] if found else []
        if not found or found[2]:
            break
    return flag_name(named) if len(named) > 1 else ""


def _left_out(tree: Tree) -> list[tuple[str, ...]]:
    plain = ((path, given.value if isinstance(given, Flag) else given) for path, _, given in walk(tree))
    return [path for path, value in plain if isinstance(value, str) and value == LEFT_OUT]


def command_without_secrets(argv: Sequence[str]) -> list[str]:
    """A command line with LEFT_OUT in place of the secrets in its dotted flags."""
    written: list[str] = []
    flag = ""
    for word in argv:
        name, equals, text = word.partition("=")
        if flag:
            written.append(_value_without_secrets(flag, word))
            flag = ""
            continue
        is_dotted = re.fullmatch(r"--[\w-]+(\.[\w-]+)+", name)
        written.append(f"{name}={_value_without_secrets(name, text)}" if is_dotted and equals else word)
        flag = name if is_dotted and not equals else ""
    return written


def _value_without_secrets(flag: str, text: str) -> str:
    if _secret_depth(flag.removeprefix("--").split(".")) is not None:
        return LEFT_OUT
    value = read_flag(text).value
    hidden = without_secrets(value)
    return text if hidden == value else toml_value(hidden)
