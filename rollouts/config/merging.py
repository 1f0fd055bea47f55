"""Merge the settings that name components (defaults, then a file, then flags), and read the chosen components.

The rules for files and flags:
- A component is a name (`env = "calculator"`), or a table with `name` and settings (`[env]`). If a later source names
  another component, the earlier settings are dropped. If it names the same component, they are kept.
- `reward`, `shaping`, `filter` and `logger` are lists of names, or tables by alias (`[reward.short]`; without a `name`,
  the alias is the name). A list or a table in a file replaces the default. Flags that name components replace those of
  the file. Dotted flags change the settings of the chosen components.
- `env` is one component or several. Several are written as a list, `[[env]]` tables, tables by alias, or flags such as
  `--env easy=calculator:2`, and each has an alias and a weight. A list with one name, without alias and weight, is one
  component. If a later source names several, they replace the earlier ones.
- `sft` is a tree of such settings, merged by the same rules.
- The default alias is the last part of the name. The last colon separates the weight.

`rollouts.runs.environments` applies the weights.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rollouts.config.convert import convert_value, toml_value, unflagged
from rollouts.config.files import NOWHERE, Source, refused, where
from rollouts.config.flags import Flag, Tree, flag_name
from rollouts.config.names import names_module, split_alias
from rollouts.config.settings import COMPONENT_KINDS, MULTIPLE, OWN, OWN_KEYS, WEIGHTED, without_secrets
from rollouts.config.workers import worker_table
from rollouts.errors import ConfigError, suggestion

Path = tuple[str, ...]

EnvWeight = float | dict[str, Any] | list[list[float]]
"""The weight of an environment: a number, the table of a curriculum with its `name`, or points (step, weight)."""


class Component(NamedTuple):
    """One chosen component.

    Rewards have a `weight`. If there are several environments, each has a `weight` too. `alias` is empty for a single
    component. `settings` are not converted yet; `convert_settings` does this with the component's signature. For a key
    in OWN_KEYS, `name` may be empty: then the settings are for the algorithm's own component.
    """

    name: str
    settings: dict[str, Any]
    weight: EnvWeight = 1.0
    alias: str = ""


def settings_path(key: str, component: Component) -> Path:
    """The path of a component's settings: ("env",), or ("reward", alias)."""
    return (key, component.alias) if component.alias else (key,)


def parse_component(key: str, text: str, path: str = "") -> Component:
    """Parse `[alias=]name[:weight]`; a name may be `./f.py:name` or `module:name`. Only rewards and
    environments have a weight.

    >>> parse_component("reward", "short=pkg/brevity:-0.1")
    Component(name='pkg/brevity', settings={}, weight=-0.1, alias='short')
    >>> parse_component("reward", "./f.py:fn")[0], parse_component("filter", "./f.py:fn")[3]
    ('./f.py:fn', 'fn')
    """
    path = path or key
    (alias, name), weight = split_alias(text), 1.0
    head, colon, tail = name.rpartition(":")
    if key in WEIGHTED and colon:
        if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", tail):
            name, weight = head, float(tail)
        elif key == "reward" and not head.endswith(".py") and not names_module(name):
            wrong = f"expected a weight after the last colon; {tail!r} is not a number"
            raise ConfigError(f"{path}: {wrong}\ntype: {flag_name((key,))} {head}:1.0")
    if not name:
        raise ConfigError(f"{path}: expected a name{' before the weight' if text else ''}; got {text!r}")
    alias = alias or re.split(r"[/:]", name)[-1].strip("<>").replace("-", "_")
    return Component(name, {}, weight, alias)


def merge(*trees: Tree, source: Source = NOWHERE) -> Tree:
    """Merge trees of settings, later ones over earlier ones, into a new tree. `source` is the file of those that are no
    flags, for error messages. Raises ConfigError.
    """
    merged: Tree = {}
    for tree in trees:
        for key, value in tree.items():
            before = merged.get(key, {})  # a missing table merges like an empty one
            if key in COMPONENT_KINDS:
                merged[key] = _merge_components(key, before, value, source)
            elif key == "worker":
                merged[key] = _merge_value(worker_table(before), worker_table(value))
            elif key == "sft" and isinstance(before, dict) and isinstance(value, dict):
                merged[key] = merge(before, value, source=source)
            else:
                merged[key] = _merge_value(before, value)
    return merged


def _merge_value(before: Any, value: Any) -> Any:
    if isinstance(before, dict) and isinstance(value, dict):
        return before | {key: _merge_value(before.get(key, {}), inner) for key, inner in value.items()}
    return value


def _merge_components(key: str, before: Any, value: Any, source: Source) -> Tree:
    """The merged table of one component, or merged tables by alias."""
    base, adjusts = _tables(key, before), isinstance(value, dict) and _is_adjustment(value)
    is_one = "" in base
    names_none = key == "env" and isinstance(value, dict) and "name" not in value and not holds_several(value)
    if not is_one and (adjusts or names_none):
        for alias, inner in value.items():
            owners = base if key == "env" else [name for name in base if name not in ("env", OWN)]
            if not isinstance(inner, dict) and owners and (key == "env" or isinstance(inner, Flag)):
                raise _of_which(key, alias, inner, owners)
            base[alias] = _merge_table(base.get(alias, {}), _table(inner, (key, alias), source))
        return base
    # `--env.options.name x` sets `options` of the chosen environment. It does not choose an environment with the alias
    # `options`.
    tables = {"": _table(value, (key,))} if adjusts and is_one and base[""].get("name") else _tables(key, value, source)
    if is_one and "" in tables:
        return _merge_table(base[""], tables[""])
    if is_one and base[""] and not base[""].get("name"):
        unnamed = [name for name in base[""] if name != "name"]
        if unnamed:
            raise _of_which(key, unnamed[0], base[""][unnamed[0]], tables)
    return tables.get("", tables)


def _merge_table(before: Tree, table: Tree) -> Tree:
    """Merge a component's table over the earlier one. If the name is another one, the earlier settings are dropped."""
    if "name" in table and "name" in before and _name(before["name"], ("name",)) != _name(table["name"], ("name",)):
        return dict(table)
    merged: Tree = _merge_value(before, table)
    return merged


def _is_adjustment(value: Any) -> bool:
    """Whether a value consists of dotted flags only, so that it only changes settings and does not choose a
    component.
    """
    if isinstance(value, dict):
        return bool(value) and all(_is_adjustment(inner) for inner in value.values())
    return isinstance(value, Flag)


def holds_several(table: Mapping[str, Any]) -> bool:
    """Whether this table holds environments by alias, not the settings of one environment.

    >>> holds_several({"easy": {"name": "calculator"}}), holds_several({"name": "calculator", "digits": 3})
    (True, False)
    """
    return "name" not in table and any(isinstance(inner, dict) and "name" in inner for inner in table.values())


def by_alias(key: str, table: Mapping[str, Any]) -> bool:
    """Whether the table of `key` holds components by alias, not the settings of one component."""
    return key in MULTIPLE or (key == "env" and holds_several(table))


def _of_which(key: str, name: str, value: Any, aliases: Iterable[str]) -> ConfigError:
    """The error for a setting that does not name one of several components, by its alias."""
    flags = " or ".join(flag_name((key, alias, name)) for alias in aliases)
    several = "there are several environments, and this flag does not name one of them"
    problem = several if key == "env" else f"a setting of a {key} has the alias of its {key} before its own name"
    return refused((key, name), value, NOWHERE, problem, f"type: {flags}{f' {value.text}' if key != 'env' else ''}")


def _tables(key: str, value: Any, source: Source = NOWHERE) -> dict[str, Tree]:
    """The components that a value chooses for a key, as tables by alias. The alias of a single component is empty."""
    if not isinstance(value, dict):
        if key == "env" or key in MULTIPLE:
            return _listed_tables(key, list(value) if isinstance(value, list | tuple) else [value])
        return {"": {"name": _name(value, (key,))}}
    if not by_alias(key, value):
        return {"": _table(value, (key,))}
    tables: dict[str, Tree] = {}
    for alias, inner in value.items():
        if key == "env" and not isinstance(inner, dict):
            raise _of_which(key, alias, inner, [each for each in value if isinstance(value[each], dict)])
        table = _table(inner, (key, alias), source)
        # A table in a file chooses a component. Without a name, its alias is the name.
        is_named = key == "env" or "name" in table or _is_adjustment(table)
        tables[alias.replace("-", "_")] = table if is_named else {"name": alias.replace("-", "_"), **table}
    return tables


def _listed_tables(key: str, entries: list[Any]) -> dict[str, Tree]:
    """A list of components as tables by alias."""
    if key == "env":
        for place, entry in enumerate(entries, start=1):
            if not isinstance(entry, dict) and not _name(entry, (key,)):  # `none` drops the entries before it
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
    """The alias and table of a list entry, and whether the entry gives the alias. For `none`, the alias is empty."""
    if isinstance(entry, dict):
        table = _table(entry, (key,))
        if not isinstance(table.get("name"), str):
            raise ConfigError(f"{key}: an entry of the list needs a `name`; got {without_secrets(unflagged(entry))!r}")
        component = parse_component("filter", table["name"])
        return str(table.pop("alias", component.alias)).replace("-", "_"), table, "alias" in entry
    name = _name(entry, (key,))
    if not name:
        return "", {}, False
    component = parse_component(key, name, where((key,), entry, NOWHERE))
    weight = {"weight": component.weight} if key in WEIGHTED else {}
    return component.alias, {"name": component.name, **weight}, bool(split_alias(name)[0])


def _table(value: Any, path: Path, source: Source = NOWHERE) -> Tree:
    """A copy of a component's table, its name checked. A name that is a Flag stays one, for `_is_adjustment`."""
    if isinstance(value, Flag):
        setting = flag_name((*path, "SETTING"))
        raise refused(path, value, NOWHERE, f"expected a table of settings, such as `{setting} VALUE`")
    if not isinstance(value, dict):
        key = "name" if isinstance(value, str) else "weight" if _is_number(value) and path[0] in WEIGHTED else "SETTING"
        write = f"write it as a table:\n[{'.'.join(path)}]\n{key} = {toml_value(without_secrets(value, path[-1]))}"
        raise refused(path, value, source, "expected a table of settings", write)
    if "name" in value:
        _name(value["name"], (*path, "name"))
    return dict(value)


def _name(value: Any, path: Path) -> str:
    """The name of a component as text. None and `none` become an empty name."""
    if isinstance(value, Flag):
        value = value.value if value.value is None or isinstance(value.value, str) else value.text
    if value is None:
        return ""
    if not isinstance(value, str):
        given = without_secrets(unflagged(value))
        raise ConfigError(f"{'.'.join(path)}: expected the name of a component, as text; got {given!r}")
    return "" if value.lower() == "none" else value


def components_of(
    chosen: Tree, keys: Iterable[str], source: Source = NOWHERE, place: Path = ()
) -> dict[str, list[Component]]:
    """The components that a merged tree chooses for each key. `place` is the path of the tree in its file.

    Raises ConfigError if a key that needs a component has none, or if settings are given for a component that is not
    chosen.
    """
    found: dict[str, list[Component]] = {}
    for key in keys:
        tables = _tables(key, chosen.get(key, {}))
        if "" in tables:
            found[key] = _single(key, tables[""], source, place)
            continue
        found[key] = [_several(key, alias, tables, source, place) for alias in tables]
        if key == "env" and all(each.weight == 0 for each in found[key]):
            zero = f"the weights of {' and '.join(tables)} are 0, so no environment has a task to draw"
            again = f"type: {flag_name((key, next(iter(tables)), 'weight'))} 1"
            raise refused((*place, key), None, source, zero, again)
    return found


def _single(key: str, table: Tree, source: Source, place: Path) -> list[Component]:
    settings = {name: value for name, value in table.items() if name != "name"}
    name = _name(table.get("name"), (key, "name"))
    if not name and key in ("loss", "inference", "training"):
        raise ConfigError(f"{key}: none is chosen, and a run needs one\ntype: {flag_name((key,))} NAME")
    for first, value in settings.items() if not name and key not in OWN_KEYS else ():
        from rollouts.config.foreign import foreign_hint

        again = f"type: {flag_name((key,))} NAME; `rollouts plugins list` shows what is installed"
        missing = f"no {key} is chosen, so it has no settings"
        raise refused((*place, key, first), value, source, missing, foreign_hint(first) or again)
    return [Component(name, settings)] if name or settings else []


def _several(key: str, alias: str, tables: dict[str, Tree], source: Source, place: Path) -> Component:
    """One of several components, with its weight if it has one."""
    names = {each: _name(table.get("name"), (key, each, "name")) for each, table in tables.items()}
    if not names[alias]:
        named = [each for each in names if names[each]]
        near = suggestion(alias, named, lambda name: flag_name((key, name)))
        other = f"chosen: {', '.join(named) or 'none'}; to add one, type: {flag_name((key, alias, 'name'))} NAME"
        problem = f"no {key} with the alias {alias!r} is chosen"
        raise refused((*place, key, alias), tables[alias], source, problem, near, other)
    settings = {setting: value for setting, value in tables[alias].items() if setting != "name"}
    if key not in WEIGHTED or "weight" not in settings:
        return Component(names[alias], settings, alias=alias)
    path, given = (*place, key, alias, "weight"), settings.pop("weight")
    weight = _env_weight(given, path, source) if key == "env" else convert_value(given, float, path, source)
    if isinstance(weight, float) and not math.isfinite(weight):
        raise refused(path, given, source, f"a weight must be finite; got {weight}")
    return Component(names[alias], settings, weight, alias)


def _env_weight(value: Any, path: Path, source: Source) -> EnvWeight:
    """The weight of one of several environments, checked as far as possible without an import."""
    given = unflagged(value)
    if isinstance(given, str):
        return {"name": given}
    if isinstance(given, dict) and isinstance(given.get("name"), str):
        return given
    if _is_positive(given):
        return float(given)
    fault = _fault_of_points(given) if isinstance(given, list) else f"{_NO_WEIGHT}; got {without_secrets(given)!r}"
    if fault:
        raise refused(path, value, source, fault)
    return [list(point) for point in given]


def _fault_of_points(points: list[Any]) -> str:
    """Why these are not valid points (step, weight); empty if they are."""
    if len(points) < 2 or not all(isinstance(each, list | tuple) and len(each) == 2 for each in points):
        return f"expected two or more points (step, weight), such as [[0, 0.0], [100, 1.0]]; got {points!r}"
    for wrong in (number for number in itertools.chain(*points) if not _is_positive(number)):
        return f"{_NO_WEIGHT}; got {wrong!r}"
    steps = [step for step, _ in points]
    is_rising = all(before < after for before, after in itertools.pairwise(steps))
    return "" if is_rising else f"the steps of the points must increase; got {steps}"


_NO_WEIGHT = (
    "expected the weight of an environment: a number (0 or more), points such as [[0, 0.0], [100, 1.0]], or the name "
    "of a curriculum, such as ./curriculum.py:harder"
)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def component_table(key: str, component: Component) -> Tree:
    """The table that chooses this component: its name, its weight if it has one, and its settings. A component's
    setting called `name` cannot be given: in the table, `name` is the component.
    """
    weight = component.weight
    if isinstance(weight, dict) and len(weight) == 1:  # a curriculum without settings is written as a plain name
        weight = weight["name"]
    has_weight = key in WEIGHTED and bool(component.alias)
    own = {"name": component.name, **({"weight": weight} if has_weight else {})}
    return {**own, **component.settings, **own}


def component_tables(components: Mapping[str, list[Component]]) -> Tree:
    """The tree of settings that chooses these components: the inverse of `components_of`."""
    trees: Tree = {}
    for key, chosen in components.items():
        tables = {each.alias: component_table(key, each) for each in chosen}
        trees[key] = tables if key in MULTIPLE or any(tables) else tables.get("", {"name": ""})
    return trees


def component_names(components: Mapping[str, list[Component]]) -> dict[str, Any]:
    """The values of the settings that name components, as `Settings` holds them: one name, or a tuple of texts such as
    `alias=name:weight`, without parts that equal their default.
    """

    def written(key: str, component: Component) -> str:
        text, weight = component.name, component.weight
        if key in WEIGHTED and isinstance(weight, float):
            text += f":{int(weight)}" if weight == int(weight) and abs(weight) < 1e6 else f":{weight!r}"
        return text if parse_component(key, text).alias == component.alias else f"{component.alias}={text}"

    return {
        key: tuple(written(key, each) for each in chosen)
        if key in MULTIPLE or any(each.alias for each in chosen)
        else next((each.name for each in chosen), "")
        for key, chosen in components.items()
    }
