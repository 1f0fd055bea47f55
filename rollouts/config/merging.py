"""What names components: merging flags over a file over defaults, and reading out what was chosen.

The rules, which files and flags share:
- A component is a name (`env = "calculator"`), or a table with `name` and its settings (`[env]`). Naming another
  component drops the settings that were written for the one before; naming the same one keeps them.
- `reward`, `shaping`, `filter` and `logger` are lists of names, or tables by alias (`[reward.short]`, whose `name` is
  the alias where it has none). What names them replaces what was there (a file the default, a flag the file's list);
  dotted flags change the settings of those that are chosen.
- `env` is one component, or a list of several, each with an alias and a weight; a list of one without either is that
  one. Naming several replaces what was there.
- `sft` is a tree of such settings, merged by the same rules.
- An alias that is not given is the last part of the name. Only the last colon separates a weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rollouts.config.convert import convert_value, plain
from rollouts.config.environments import (
    EnvWeight,
    check_weights,
    env_weight,
    holds_several,
    of_which,
    written_weight,
)
from rollouts.config.files import NOWHERE, Source, where
from rollouts.config.flags import Flag, Tree, flag_name
from rollouts.config.settings import MULTIPLE, OWN_KEYS, SINGLE, WEIGHTED
from rollouts.errors import ConfigError, near_misses

__all__ = [
    "Component",
    "component_tables",
    "components_of",
    "merge",
    "parse_component",
    "settings_path",
    "written_component",
]


class Component(NamedTuple):
    """One chosen component. `weight` counts for rewards, and for several environments, whose weights may be curricula;
    `alias` is empty where only one can be chosen, and for an environment that is alone.

    `settings` are as they were given until `convert_settings` has seen the component's signature.
    Those of OWN_KEYS may have an empty name: the settings are then for the algorithm's own.
    """

    name: str
    settings: dict[str, Any]
    weight: EnvWeight = 1.0
    alias: str = ""


def settings_path(key: str, component: Component) -> tuple[str, ...]:
    """Where a component's settings stand: ("env",), or ("reward", alias)."""
    return (key, component.alias) if component.alias else (key,)


def parse_component(key: str, text: str, path: str = "") -> Component:
    """Read `[alias=]name[:weight]` (the weight for rewards and environments; a file is `./f.py:name[:weight]`).

    >>> parse_component("reward", "short=pkg/brevity:-0.1")
    Component(name='pkg/brevity', settings={}, weight=-0.1, alias='short')
    >>> parse_component("reward", "./f.py:fn")[0], parse_component("filter", "./f.py:fn")[3]
    ('./f.py:fn', 'fn')
    """
    path = path or key
    match = re.fullmatch(r"(?:(?P<alias>[A-Za-z_][\w-]*)=)?(?P<rest>.+)", text, re.DOTALL)
    if match is None:
        raise ConfigError(f"{path}: expected a name; got {text!r}")
    name, weight = match["rest"], 1.0
    head, colon, tail = name.rpartition(":")
    if key in WEIGHTED and colon:
        if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", tail):
            name, weight = head, float(tail)
        elif key == "reward" and not head.endswith(".py"):
            raise ConfigError(
                f"{path}: what follows the last colon is the weight, and {tail!r} is no number\n"
                f"type: {flag_name((key,))} {head}:1.0"
            )
    if not name:
        raise ConfigError(f"{path}: {text!r} has no name before the weight")
    alias = match["alias"] or re.split(r"[/:]", name)[-1]
    return Component(name, {}, weight, alias.replace("-", "_"))


def merge(*trees: Tree) -> Tree:
    """One tree out of several, later ones over earlier ones; no argument is changed. Raises ConfigError."""
    merged: Tree = {}
    for tree in trees:
        for key, value in tree.items():
            # An absent table and an empty one merge alike.
            merged[key] = _merge_key(key, merged.get(key, {}), value)
    return merged


def _merge_key(key: str, before: Any, value: Any) -> Any:
    if key == "sft" and isinstance(before, dict) and isinstance(value, dict):
        return merge(before, value)  # a tree of its own
    if key == "env":
        return _merge_env(before, value)
    if key in SINGLE:
        return _merge_table(_single_table(key, before), _single_table(key, value))
    if key in MULTIPLE:
        if isinstance(value, dict) and _is_adjustment(value):
            base = _multiple_tables(key, before)
            for alias, table in value.items():
                base[alias] = _merge_table(base.get(alias, {}), _table(table, (key, alias)))
            return base
        return _multiple_tables(key, value)
    if isinstance(before, dict) and isinstance(value, dict):
        return {**before, **{inner: _merge_key("", before.get(inner, {}), value[inner]) for inner in value}}
    return value


def _merge_table(before: Tree, table: Tree) -> Tree:
    """A component's table over the one before it; another name drops the old settings."""
    if "name" in table and "name" in before and _name(before["name"], ("name",)) != _name(table["name"], ("name",)):
        return dict(table)
    merged = _merge_key("", before, table)
    assert isinstance(merged, dict)
    return merged


def _merge_env(before: Any, value: Any) -> Tree:
    """One environment over one merges as any component does; naming several, or one in place of several, replaces what
    was there; dotted flags, and tables that name nothing, change the settings of those that are chosen.
    """
    base = _env_tables(before)
    names_none = isinstance(value, dict) and "name" not in value and (_is_adjustment(value) or not holds_several(value))
    if holds_several(base) and names_none:
        for alias, inner in value.items():
            if not isinstance(inner, dict):
                raise of_which(alias, inner, list(base))
            base[alias] = _merge_table(base.get(alias, {}), _table(inner, ("env", alias)))
        return base
    is_flagged = bool(base.get("name")) and _is_adjustment(value) and isinstance(value, dict)
    table = _table(value, ("env",)) if is_flagged else _env_tables(value)
    if is_flagged or not (holds_several(base) or holds_several(table)):
        return _merge_table(base, table)
    unnamed = [name for name in base if name != "name"]
    if unnamed and not holds_several(base) and not base.get("name"):
        raise of_which(unnamed[0], base[unnamed[0]], list(table))
    return table


def _env_tables(value: Any) -> Tree:
    """The environment's table, or the tables of several by alias."""
    if isinstance(value, dict):
        if not holds_several(value):
            return _table(value, ("env",))
        for alias, inner in value.items():
            if not isinstance(inner, dict):
                raise of_which(alias, inner, [each for each in value if isinstance(value[each], dict)])
        return {alias.replace("-", "_"): _table(inner, ("env", alias)) for alias, inner in value.items()}
    entries = list(value) if isinstance(value, list | tuple) else [value]
    for place, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) and not _name(entry, ("env",)):  # `none`: nothing of what came before it
            return _env_tables(entries[place:])
    if not entries:
        return {"name": ""}
    if len(entries) == 1 and isinstance(entries[0], dict) and not {"alias", "weight"} & entries[0].keys():
        return _table(entries[0], ("env",))
    if len(entries) == 1 and not isinstance(entries[0], dict):
        name = _name(entries[0], ("env",))
        if parse_component("env", name).name == name:
            return {"name": name}
    tables = _multiple_tables("env", entries)
    if "name" in tables:
        raise ConfigError("env: an environment cannot have the alias `name`\ntype: --env OTHER=name")
    return tables


def _is_adjustment(value: Any) -> bool:
    """Whether a value consists of dotted flags: it changes what is chosen and chooses nothing."""
    if isinstance(value, dict):
        return bool(value) and all(_is_adjustment(inner) for inner in value.values())
    return isinstance(value, Flag)


def _table(value: Any, path: tuple[str, ...]) -> Tree:
    """A component's table, its name checked. The name stays a flag if it is one: `_is_adjustment` asks for it."""
    if not isinstance(value, dict):
        setting = flag_name((*path, "SETTING"))
        raise ConfigError(f"{where(path, value, NOWHERE)}: expected a table of settings, such as `{setting} VALUE`")
    if "name" in value:
        _name(value["name"], (*path, "name"))
    return dict(value)


def _name(value: Any, path: tuple[str, ...]) -> str:
    """A component's name as text; None and `none` are the empty name."""
    if isinstance(value, Flag):
        value = "" if value.value is None else value.value if isinstance(value.value, str) else value.text
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigError(f"{'.'.join(path)}: expected the name of a component, as text; got {plain(value)!r}")
    return "" if value.lower() == "none" else value


def _single_table(key: str, value: Any) -> Tree:
    if isinstance(value, dict):
        return _table(value, (key,))
    return {"name": _name(value, (key,))}


def _multiple_tables(key: str, value: Any) -> dict[str, Tree]:
    """A list of components as tables by alias."""
    if value is None:
        return {}
    if isinstance(value, dict):
        tables = {alias.replace("-", "_"): _table(table, (key, alias)) for alias, table in value.items()}
        # What a file writes as a table is chosen: without a name, its alias is the name.
        return {
            alias: table if "name" in table or _is_adjustment(table) else {"name": alias, **table}
            for alias, table in tables.items()
        }
    entries = value if isinstance(value, list | tuple) else [value]
    tables = {}
    for entry in entries:
        alias, table, is_given = _entry(key, entry)
        if alias in tables and is_given:
            raise ConfigError(f"{key}: two entries have the alias {alias!r}; type {flag_name((key,))} OTHER=name")
        number = 2
        unique = alias
        while unique in tables:
            unique, number = f"{alias}_{number}", number + 1
        if unique:
            tables[unique] = table
    return tables


def _entry(key: str, entry: Any) -> tuple[str, Tree, bool]:
    """Alias and table of one entry of a list, and whether the alias was given; an empty alias for `none`."""
    if isinstance(entry, dict):
        table = _table(entry, (key,))
        if not isinstance(table.get("name"), str):
            raise ConfigError(f"{key}: an entry of the list needs a `name`; got {plain(entry)!r}")
        component = parse_component("filter", table["name"])
        alias = str(table.pop("alias", component.alias)).replace("-", "_")
        return alias, table, "alias" in entry
    name = _name(entry, (key,))
    if not name:
        return "", {}, False
    component = parse_component(key, name, where((key,), entry, NOWHERE))
    weight = {"weight": component.weight} if key in WEIGHTED else {}
    is_given = bool(re.match(r"[A-Za-z_][\w-]*=", name))
    return component.alias, {"name": component.name, **weight}, is_given


def components_of(
    chosen: Tree, keys: Iterable[str], source: Source = NOWHERE, place: tuple[str, ...] = ()
) -> dict[str, list[Component]]:
    """The components that a merged tree chooses for each key; `place` is where the tree stands in its file.

    Raises ConfigError: a key that needs a component and has none, settings for a component that is not chosen.
    """
    return {
        key: (_multiple if key in MULTIPLE or (key == "env" and holds_several(chosen.get(key, {}))) else _single)(
            key, chosen.get(key, {}), source, place
        )
        for key in keys
    }


def component_tables(components: Mapping[str, list[Component]]) -> Tree:
    """The tree that chooses these components: the inverse of `components_of`."""
    trees: Tree = {}
    for key, chosen in components.items():
        if key in MULTIPLE or any(each.alias for each in chosen):
            weights = [{"weight": written_weight(each.weight)} if key in WEIGHTED else {} for each in chosen]
            trees[key] = {
                each.alias: {"name": each.name, **weight, **each.settings}
                for each, weight in zip(chosen, weights, strict=True)
            }
        else:
            trees[key] = {"name": chosen[0].name, **chosen[0].settings} if chosen else {"name": ""}
    return trees


def _single(key: str, table: Tree, source: Source, place: tuple[str, ...]) -> list[Component]:
    settings = {name: value for name, value in table.items() if name != "name"}
    name = _name(table.get("name", ""), (key, "name"))
    if not name and key in ("loss", "inference", "training"):
        raise ConfigError(f"{key}: none is chosen, and a run needs one\ntype: {flag_name((key,))} NAME")
    if not name and settings and key not in OWN_KEYS:
        first = next(iter(settings))
        raise ConfigError(
            f"{where((*place, key, first), settings[first], source)}: no {key} is chosen that could have this setting\n"
            f"type: {flag_name((key,))} NAME; `rollouts plugins list` shows what is installed"
        )
    return [Component(name, settings)] if name or settings else []


def _multiple(key: str, tables: dict[str, Tree], source: Source, place: tuple[str, ...]) -> list[Component]:
    names = {alias: _name(table.get("name", ""), (key, alias, "name")) for alias, table in tables.items()}
    chosen = [alias for alias, name in names.items() if name]
    components = []
    for alias, table in tables.items():
        if not names[alias]:
            near = near_misses(alias, chosen)
            raise ConfigError(
                f"{where((*place, key, alias), table, source)}: no {key} with the alias {alias!r} is chosen"
                + (f"\ndid you mean: {', '.join(flag_name((key, name)) for name in near)}?" if near else "")
                + f"\nchosen: {', '.join(chosen) or 'none'}; to add one, type {flag_name((key, alias, 'name'))} NAME"
            )
        settings = {name: value for name, value in table.items() if name not in ("name", "weight")}
        weight: EnvWeight = 1.0
        path = (*place, key, alias, "weight")
        if "weight" in table and key == "env":
            weight = env_weight(table["weight"], path, source)
        elif "weight" in table and key == "reward":
            weight = number = convert_value(table["weight"], float, path, source)
            if not math.isfinite(number):
                raise ConfigError(f"{where(path, table['weight'], source)}: a weight must be finite; got {number}")
        elif "weight" in table:
            settings["weight"] = table["weight"]
        components.append(Component(names[alias], settings, weight, alias))
    if key == "env":
        check_weights({each.alias: each.weight for each in components}, source, place)
    return components


def written_component(key: str, component: Component) -> str:
    """The component as one entry of a list, as short as it can be."""
    text, weight = component.name, component.weight
    if key in WEIGHTED and component.alias and isinstance(weight, float):
        text += f":{int(weight)}" if weight == int(weight) and abs(weight) < 1e6 else f":{weight!r}"
    if parse_component(key, text).alias != component.alias:
        text = f"{component.alias}={text}"
    return text
