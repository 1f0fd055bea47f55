"""Secrets among components' settings (`--inference.body.api-key sk-1`): they are used, and written nowhere.

A setting is one by its name, see `rollouts.child_environment.names_secret`, at any depth. In what is written LEFT_OUT
stands in its place; who runs such a file is asked for it. Left out: the core's own settings, none of which is a secret.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollouts.child_environment import names_secret
from rollouts.config.files import Source, where
from rollouts.config.flags import Flag, Tree, flag_name, read_flag
from rollouts.config.values import toml_value
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from rollouts.config.resolving import Resolved

__all__ = ["LEFT_OUT", "command_without_secrets", "refuse_left_out", "resolved_without_secrets", "without_secrets"]

LEFT_OUT = "(a secret, left out)"


def without_secrets(settings: Any, name: str = "") -> Any:
    """A copy of components' settings with LEFT_OUT in place of every secret.

    >>> without_secrets({"url": "http://h", "body": {"api_key": "sk-1", "max_tokens": 3}})
    {'url': 'http://h', 'body': {'api_key': '(a secret, left out)', 'max_tokens': 3}}
    """
    if isinstance(settings, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in settings.items()}
    if isinstance(settings, list | tuple) and not hasattr(settings, "_fields"):
        return type(settings)(without_secrets(each, name) for each in settings)
    return LEFT_OUT if isinstance(settings, str) and settings and names_secret(name) else settings


def resolved_without_secrets(resolved: Resolved) -> Resolved:
    """The same for all components of a run."""
    settings = resolved.settings
    core = {key: without_secrets(getattr(settings, key)) for key in ("schedule", "sft")}
    components = {
        key: [
            each._replace(settings=without_secrets(each.settings), weight=without_secrets(each.weight)) for each in all_
        ]
        for key, all_ in resolved.components.items()
    }
    return resolved._replace(settings=dataclasses.replace(settings, **core), components=components)


def refuse_left_out(tree: Tree, source: Source) -> None:
    """Raise ConfigError where a secret was left out of a settings file and is not given anew."""
    missing = _left_out(tree, ())
    if missing:
        flags = " ".join(f"{flag_name(path)} VALUE" for path in missing)
        raise ConfigError(
            f"{where(missing[0], None, source)}: a secret, which was left out when this was written\n"
            f"type it anew: {flags}"
        )


def _left_out(value: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    if isinstance(value, Flag):
        value = value.value
    if isinstance(value, Mapping):
        return [found for key, inner in value.items() for found in _left_out(inner, (*path, str(key)))]
    if isinstance(value, list | tuple) and path:
        *tables, name = path
        named = [(*tables, f"{name}[{place}]") for place in range(len(value))]
        return [found for at, inner in zip(named, value, strict=True) for found in _left_out(inner, at)]
    return [path] if value == LEFT_OUT else []


def command_without_secrets(argv: Sequence[str]) -> list[str]:
    """A command as it was typed, with LEFT_OUT in place of the secrets in its dotted flags."""
    written: list[str] = []
    flag = ""
    for word in argv:
        found = re.fullmatch(r"(--[\w-]+(?:\.[\w-]+)+)(?:=(.*))?", word, re.DOTALL)
        if flag:
            written.append(_value_without_secrets(flag, word))
            flag = ""
        elif found is None:
            written.append(word)
        elif found[2] is None:
            written.append(word)
            flag = found[1]
        else:
            written.append(f"{found[1]}={_value_without_secrets(found[1], found[2])}")
    return written


def _value_without_secrets(flag: str, text: str) -> str:
    name = flag.rpartition(".")[2]
    if names_secret(name):
        return LEFT_OUT
    value = read_flag(text).value
    hidden = without_secrets(value)
    return text if hidden == value else toml_value(hidden)
