"""What names components: merging flags over a file over defaults, and reading out what was chosen.

The rules, which files and flags share:
- A component is a name (`env = "calculator"`), or a table with `name` and its settings (`[env]`). Naming another
  component drops the settings that were written for the one before; naming the same one keeps them.
- `reward`, `shaping`, `filter` and `logger` are lists of names, or tables by alias (`[reward.short]`, whose `name` is
  the alias where it has none). What names them replaces what was there (a file the default, a flag the file's list);
  dotted flags change the settings of those that are chosen.
- `env` is one component, or several, each with an alias and a weight: a list, `[[env]]` tables, tables by alias, or
  `--env easy=calculator:2`. A list of one without either is that one, and in tables by alias there is no `name` but
  inside them. Naming several replaces what was there.
- `sft` is a tree of such settings, merged by the same rules.
- An alias that is not given is the last part of the name. Only the last colon separates a weight.

Left out: what a weight means (`rollouts.runs.environments`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rollouts.config.convert import convert_value, plain
from rollouts.config.files import NOWHERE, Source, refusal, where
from rollouts.config.flags import Flag, Tree, flag_name
from rollouts.config.settings import COMPONENT_KINDS, MULTIPLE, OWN_KEYS, WEIGHTED, without_secrets
from rollouts.errors import ConfigError, suggestion

Path = tuple[str, ...]

EnvWeight = float | dict[str, Any] | list[list[float]]
"""A number; a curriculum: its table with `name`; or the points (step, weight) that it goes through."""


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


def settings_path(key: str, component: Component) -> Path:
    """The path of a component's settings: ("env",), or ("reward", alias)."""
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
            before = merged.get(key, {})  # an absent table and an empty one merge alike
            if key in COMPONENT_KINDS:
                merged[key] = _merge_components(key, before, value)
            elif key == "sft" and isinstance(before, dict) and isinstance(value, dict):
                merged[key] = merge(before, value)
            else:
                merged[key] = _merge_value(before, value)
    return merged


def _merge_value(before: Any, value: Any) -> Any:
    if isinstance(before, dict) and isinstance(value, dict):
        return before | {key: _merge_value(before.get(key, {}), inner) for key, inner in value.items()}
    return value


def _merge_components(key: str, before: Any, value: Any) -> Tree:
    """The table of one component, or tables by alias."""
    base, adjusts = _tables(key, before), isinstance(value, dict) and _is_adjustment(value)
    is_one = "" in base
    names_none = key == "env" and isinstance(value, dict) and "name" not in value and not holds_several(value)
    if not is_one and (adjusts or names_none):
        for alias, inner in value.items():
            if key == "env" and not isinstance(inner, dict):
                raise _of_which(alias, inner, base)
            base[alias] = _merge_table(base.get(alias, {}), _table(inner, (key, alias)))
        return base
    # `--env.options.name x` is a setting of the environment that is named, and no environment of that alias.
    tables = {"": _table(value, (key,))} if adjusts and is_one and base[""].get("name") else _tables(key, value)
    if is_one and "" in tables:
        return _merge_table(base[""], tables[""])
    if is_one and base[""] and not base[""].get("name"):
        unnamed = [name for name in base[""] if name != "name"]
        if unnamed:
            raise _of_which(unnamed[0], base[""][unnamed[0]], tables)
    return tables.get("", tables)


def _merge_table(before: Tree, table: Tree) -> Tree:
    """A component's table over the one before it; another name drops the old settings."""
    if "name" in table and "name" in before and _name(before["name"], ("name",)) != _name(table["name"], ("name",)):
        return dict(table)
    merged: Tree = _merge_value(before, table)
    return merged


def _is_adjustment(value: Any) -> bool:
    """Whether a value consists of dotted flags: it changes what is chosen and chooses nothing."""
    if isinstance(value, dict):
        return bool(value) and all(_is_adjustment(inner) for inner in value.values())
    return isinstance(value, Flag)


def holds_several(table: Mapping[str, Any]) -> bool:
    """Whether this is a table of environments by alias, not the settings of one.

    >>> holds_several({"easy": {"name": "calculator"}}), holds_several({"name": "calculator", "digits": 3})
    (True, False)
    """
    return "name" not in table and any(isinstance(inner, dict) and "name" in inner for inner in table.values())


def by_alias(key: str, table: Mapping[str, Any]) -> bool:
    """Whether the table of a key holds components by alias, not the settings of one."""
    return key in MULTIPLE or (key == "env" and holds_several(table))


def _of_which(name: str, value: Any, aliases: Iterable[str]) -> ConfigError:
    """The error for a setting that does not say which of several environments it is for."""
    flags = " or ".join(flag_name(("env", alias, name)) for alias in aliases)
    several = "there are several environments, and this does not say for which of them it is"
    return refusal(("env", name), value, NOWHERE, several, f"type: {flags}")


def _tables(key: str, value: Any) -> dict[str, Tree]:
    """What a value chooses for a key, as tables by alias. The alias of one that is alone is empty."""
    if not isinstance(value, dict):
        if key == "env" or key in MULTIPLE:
            return _listed_tables(key, list(value) if isinstance(value, list | tuple) else [value])
        return {"": {"name": _name(value, (key,))}}
    if not by_alias(key, value):
        return {"": _table(value, (key,))}
    tables: dict[str, Tree] = {}
    for alias, inner in value.items():
        if key == "env" and not isinstance(inner, dict):
            raise _of_which(alias, inner, [each for each in value if isinstance(value[each], dict)])
        table = _table(inner, (key, alias))
        # What a file writes as a table is chosen: without a name, its alias is the name.
        is_named = key == "env" or "name" in table or _is_adjustment(table)
        tables[alias.replace("-", "_")] = table if is_named else {"name": alias.replace("-", "_"), **table}
    return tables


def _listed_tables(key: str, entries: list[Any]) -> dict[str, Tree]:
    """A list of components as tables by alias."""
    if key == "env":
        for place, entry in enumerate(entries, start=1):
            if not isinstance(entry, dict) and not _name(entry, (key,)):  # `none`: nothing of what came before it
                return _listed_tables(key, entries[place:])
        if not entries:
            return {"": {"name": ""}}
        if len(entries) == 1 and isinstance(entries[0], dict) and not {"alias", "weight"} & entries[0].keys():
            return {"": _table(entries[0], (key,))}
        if len(entries) == 1 and not isinstance(entries[0], dict):
            name = _name(entries[0], (key,))
            if parse_component(key, name).name == name:
                return {"": {"name": name}}
    tables: dict[str, Tree] = {}
    for entry in entries:
        alias, table, is_given = _entry(key, entry)
        if alias in tables and is_given:
            raise ConfigError(f"{key}: two entries have the alias {alias!r}; type {flag_name((key,))} OTHER=name")
        numbered = (alias, *(f"{alias}_{number}" for number in range(2, len(entries) + 1)))
        if alias:
            tables[next(each for each in numbered if each not in tables)] = table
    if key == "env" and "name" in tables:
        raise ConfigError("env: an environment cannot have the alias `name`\ntype: --env OTHER=name")
    return tables


def _entry(key: str, entry: Any) -> tuple[str, Tree, bool]:
    """Alias and table of one entry of a list, and whether the alias was given; an empty alias for `none`."""
    if isinstance(entry, dict):
        table = _table(entry, (key,))
        if not isinstance(table.get("name"), str):
            raise ConfigError(f"{key}: an entry of the list needs a `name`; got {without_secrets(plain(entry))!r}")
        component = parse_component("filter", table["name"])
        return str(table.pop("alias", component.alias)).replace("-", "_"), table, "alias" in entry
    name = _name(entry, (key,))
    if not name:
        return "", {}, False
    component = parse_component(key, name, where((key,), entry, NOWHERE))
    weight = {"weight": component.weight} if key in WEIGHTED else {}
    is_given = bool(re.match(r"[A-Za-z_][\w-]*=", name))
    return component.alias, {"name": component.name, **weight}, is_given


def _table(value: Any, path: Path) -> Tree:
    """A component's table, its name checked. The name stays a flag if it is one: `_is_adjustment` asks for it."""
    if not isinstance(value, dict):
        setting = flag_name((*path, "SETTING"))
        raise refusal(path, value, NOWHERE, f"expected a table of settings, such as `{setting} VALUE`")
    if "name" in value:
        _name(value["name"], (*path, "name"))
    return dict(value)


def _name(value: Any, path: Path) -> str:
    """A component's name as text; None and `none` are the empty name."""
    if isinstance(value, Flag):
        value = value.value if value.value is None or isinstance(value.value, str) else value.text
    if value is None:
        return ""
    if not isinstance(value, str):
        given = without_secrets(plain(value))
        raise ConfigError(f"{'.'.join(path)}: expected the name of a component, as text; got {given!r}")
    return "" if value.lower() == "none" else value


def components_of(
    chosen: Tree, keys: Iterable[str], source: Source = NOWHERE, place: Path = ()
) -> dict[str, list[Component]]:
    """The components that a merged tree chooses for each key; `place` is the path of the tree in its file.

    Raises ConfigError: a key that needs a component and has none, settings for a component that is not chosen.
    """
    found: dict[str, list[Component]] = {}
    for key in keys:
        tables = _tables(key, chosen.get(key, {}))
        if "" in tables:
            found[key] = _single(key, tables[""], source, place)
            continue
        names = {alias: _name(table.get("name"), (key, alias, "name")) for alias, table in tables.items()}
        for alias, table in tables.items():
            if not names[alias]:
                named = [each for each in names if names[each]]
                near = suggestion(alias, named, lambda name: flag_name((key, name)))  # noqa: B023 - called at once
                other = f"chosen: {', '.join(named) or 'none'}; to add one, type {flag_name((key, alias, 'name'))} NAME"
                problem = f"no {key} with the alias {alias!r} is chosen"
                raise refusal((*place, key, alias), table, source, problem, near, other)
        found[key] = [_several(key, alias, names[alias], table, source, place) for alias, table in tables.items()]
        if key == "env" and all(each.weight == 0 for each in found[key]):
            zero = f"the weights of {' and '.join(names)} sum to 0, so no task could be drawn"
            again = f"type: {flag_name((key, next(iter(names)), 'weight'))} 1"
            raise refusal((*place, key), None, source, zero, again)
    return found


def _single(key: str, table: Tree, source: Source, place: Path) -> list[Component]:
    settings = {name: value for name, value in table.items() if name != "name"}
    name = _name(table.get("name"), (key, "name"))
    if not name and key in ("loss", "inference", "training"):
        raise ConfigError(f"{key}: none is chosen, and a run needs one\ntype: {flag_name((key,))} NAME")
    if not name and settings and key not in OWN_KEYS:
        first = next(iter(settings))
        again = f"type: {flag_name((key,))} NAME; `rollouts plugins list` shows what is installed"
        missing = f"no {key} is chosen that could have this setting"
        raise refusal((*place, key, first), settings[first], source, missing, again)
    return [Component(name, settings)] if name or settings else []


def _several(key: str, alias: str, name: str, table: Tree, source: Source, place: Path) -> Component:
    """One of several components, with its weight where it has one."""
    settings = {setting: value for setting, value in table.items() if setting != "name"}
    if key not in WEIGHTED or "weight" not in table:
        return Component(name, settings, alias=alias)
    path, given = (*place, key, alias, "weight"), settings.pop("weight")
    if key == "env":
        return Component(name, settings, _env_weight(given, path, source), alias)
    weight = convert_value(given, float, path, source)
    if not math.isfinite(weight):
        raise refusal(path, given, source, f"a weight must be finite; got {weight}")
    return Component(name, settings, weight, alias)


def _env_weight(value: Any, path: Path, source: Source) -> EnvWeight:
    """The weight of one of several environments, checked as far as it can be without importing anything."""
    given = plain(value)
    if isinstance(given, str):
        return {"name": given}
    if isinstance(given, dict) and isinstance(given.get("name"), str):
        return given
    if _is_positive(given):
        return float(given)
    fault = _fault_of_points(given)
    if fault:
        raise refusal(path, value, source, fault)
    return [list(point) for point in given]


def _fault_of_points(points: Any) -> str:
    """Why these are no points (step, weight) for a weight to go through; empty where they are."""
    if not isinstance(points, list):
        return f"{_NO_WEIGHT}; got {without_secrets(points)!r}"
    if len(points) < 2 or not all(isinstance(each, list | tuple) and len(each) == 2 for each in points):
        return (
            "a weight that changes goes through two points (step, weight) or more, such as [[0, 0.0], [100, 1.0]]; "
            f"got {points!r}"
        )
    wrong = [number for number in itertools.chain(*points) if not _is_positive(number)]
    steps = [step for step, _ in points]
    if not wrong and any(after <= before for before, after in itertools.pairwise(steps)):
        return f"the steps of the points must rise; got {steps}"
    return f"{_NO_WEIGHT}; got {wrong[0]!r}" if wrong else ""


_NO_WEIGHT = (
    "the weight of an environment is a number that is 0 or more, points such as [[0, 0.0], [100, 1.0]], or the name of "
    "a curriculum, such as ./curriculum.py:harder"
)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def component_table(key: str, component: Component) -> Tree:
    """The table that chooses this component: its name, its weight where it has one, and its settings. A setting called
    `name` cannot be given in a table, and has its default.
    """
    weight = component.weight
    if isinstance(weight, dict) and len(weight) == 1:  # a curriculum without settings is its name alone
        weight = weight["name"]
    has_weight = key in WEIGHTED and bool(component.alias)
    own = {"name": component.name, **({"weight": weight} if has_weight else {})}
    return {**own, **component.settings, **own}


def component_tables(components: Mapping[str, list[Component]]) -> Tree:
    """The tree that chooses these components: the inverse of `components_of`."""
    trees: Tree = {}
    for key, chosen in components.items():
        tables = {each.alias: component_table(key, each) for each in chosen}
        trees[key] = tables if key in MULTIPLE or any(tables) else tables.get("", {"name": ""})
    return trees


def component_names(components: Mapping[str, list[Component]]) -> dict[str, Any]:
    """What the settings that name components say, as `Settings` holds it: of several a list of texts, each as short as
    it can be.
    """
    return {
        key: tuple(_written(key, each) for each in chosen)
        if key in MULTIPLE or any(each.alias for each in chosen)
        else next((each.name for each in chosen), "")
        for key, chosen in components.items()
    }


def _written(key: str, component: Component) -> str:
    text, weight = component.name, component.weight
    if key in WEIGHTED and isinstance(weight, float):
        text += f":{int(weight)}" if weight == int(weight) and abs(weight) < 1e6 else f":{weight!r}"
    if parse_component(key, text).alias != component.alias:
        text = f"{component.alias}={text}"
    return text
