"""Write resolved settings as the text of a settings file. `rollouts run FILE` with that file repeats the run.

With `commented`, each setting has a comment with its description, type and default. For the settings of components,
pass their signatures: this module imports no component.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollouts.config.convert import default_text, describe_type, toml_key, toml_value
from rollouts.config.flags import flag_name
from rollouts.config.merging import Component, by_alias, component_table, settings_path
from rollouts.config.objects import origin_of
from rollouts.config.resolving import Resolved
from rollouts.config.settings import AUTO, COMPONENT_KINDS, EVAL, FILE_ONLY, OWN, Setting, setting_infos
from rollouts.errors import ConfigError

_HEADER = """\
# All settings of a run, for `rollouts run FILE`. Flags of the command override the settings in this file.
# `rollouts plugins list` lists the components that you can name. `rollouts plugins show NAME` lists their settings.
"""

_NOTES = {
    "template": "Arguments of the chat template.",
    "worker": "Where environments run.",
    "role": "Roles that another model plays.",
    "sft": "Settings that differ in the supervised phase.",
    "schedule": "Changes from a step on.",
    "env": "Environments, mixed by weight. Each has a table [[env]] with its name, alias, weight and settings.",
    "tool": "Added tools. Each has a table [tool.ALIAS] with its name and settings.",
    "reward": "Rewards, mixed by weight. Each has a table [reward.ALIAS] with its name, weight and settings.",
    "shaping": "Shapings of rewards, in their order. Each has a table [shaping.ALIAS] with its name and settings.",
    "filter": "Filters of groups. Each has a table [filter.ALIAS] with its name and settings.",
    "logger": "Loggers. Each has a table [logger.ALIAS] with its name and settings.",
}

Settings_ = Mapping[tuple[str, ...], Sequence[Setting]]


def to_toml(
    resolved: Resolved,
    commented: bool = False,
    signatures: Settings_ | None = None,
    *,
    differing_from: Resolved | None = None,
) -> str:
    """The text of the file. `signatures` maps the path of a component (see `settings_path`) to its settings, for the
    comments. With `differing_from`, only what differs from these settings is written.

    Raises ConfigError for a component's setting that TOML cannot hold.
    """

    def noted(key: str) -> list[str]:
        return [f"# {_NOTES[key]}"] if commented and key in _NOTES else []

    settings = resolved.settings
    left_out: set[str] = set()
    if differing_from is not None:
        names = [info.name for info in setting_infos()]
        left_out = {name for name in names if _value_of(name, resolved) == _value_of(name, differing_from)}
    infos = [info for info in setting_infos() if info.name in EVAL or settings.mode != "eval"]
    sections = [_HEADER.splitlines() if commented else []]
    group = ""
    for info in infos:
        value = getattr(settings, info.name)
        is_table = _value_of(info.name, resolved) and info.name in ("worker", *FILE_ONLY, *COMPONENT_KINDS)
        if info.name in left_out or is_table:  # tables are written below
            continue
        if commented and info.group != group:
            sections.append([f"# ---- {info.group} ----"])
            group = info.group
        sections[-1] += [*([_explained(info)] if commented else []), f"{info.name} = {toml_value(value)}"]
    roles = (_table_lines(("role", name), table) for name, table in settings.role.items())
    tables: dict[str, Iterable[str]] = {
        "template": _table_lines(("template",), settings.template),
        "worker": _inside_lines("worker", settings.worker, "[worker]"),
        "role": itertools.chain.from_iterable(roles),
        "sft": _inside_lines("sft", settings.sft, "[sft]"),
    }
    sections += [[*noted(key), *lines] for key, lines in tables.items() if getattr(settings, key)]
    named = {info.name: info for info in infos}
    for key in (key for key in COMPONENT_KINDS if key in named and key not in left_out):
        chosen = resolved.components[key]
        if any(each.alias for each in chosen):
            sections.append(noted(key))
        for component in chosen:
            known = (signatures or {}).get(settings_path(key, component))
            held = resolved.source.objects.components.get(component.name)
            origin = [f"# {origin_of(held)}"] if held is not None else []
            sections.append([*origin, *_component_lines(named[key], component, commented, known)])
    if settings.schedule:
        sections.append(noted("schedule"))
    sections += [[*_inside_lines("schedule", table, "[[schedule]]")] for table in settings.schedule]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _value_of(name: str, resolved: Resolved) -> Any:
    """The value of a setting, or the components that it chooses."""
    return resolved.components[name] if name in COMPONENT_KINDS else getattr(resolved.settings, name)


def _explained(info: Setting) -> str:
    kind = f" One of: {', '.join(info.choices)}." if info.choices else ""
    return f"# {info.doc}{kind} Default: {info.default_text}."


def _assignment(path: tuple[str, ...], key: str, value: Any) -> str:
    try:
        return f"{toml_key(key)} = {toml_value(value)}"
    except TypeError as error:
        why = f"{error}, so the settings of the run cannot be written to a file"
        raise ConfigError(f"{flag_name((*path, key))}: {why}") from error


def _inside_lines(name: str, table: Mapping[str, Any], head: str) -> Iterator[str]:
    """A table that may name components: its head, its plain values, then a table for each component."""
    yield head
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping) and value}
    yield from (_assignment((name,), key, value) for key, value in table.items() if key not in inner)
    for key, value in inner.items():
        tables = value.items() if by_alias(key, value) else [("", value)]
        for alias, each in tables:
            yield from _table_lines((name, key, alias) if alias else (name, key), each)


def _table_lines(path: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[str]:
    yield _head(path)
    yield from (_assignment(path, key, value) for key, value in table.items())


def _head(path: tuple[str, ...]) -> str:
    return "[" + ".".join(map(toml_key, path)) + "]"


def _component_lines(
    info: Setting, component: Component, commented: bool, known: Sequence[Setting] | None
) -> Iterator[str]:
    path, is_listed = settings_path(info.name, component), info.name == "env" and bool(component.alias)
    if commented and not component.alias:
        yield _explained(info)
    yield "[[env]]" if is_listed else _head(path)
    alias = {"alias": component.alias} if is_listed else {}
    own = {"name": component.name, **alias, **component_table(info.name, component._replace(settings={}))}
    table = component.settings | own
    docs = {setting.name: setting for setting in known or () if setting.name not in own} if commented else {}
    for name in {**own, **docs, **component.settings}:
        if name in docs:
            doc = " ".join(docs[name].doc.split())
            yield f"# {doc}{' ' if doc else ''}({describe_type(docs[name].type)}; {default_text(docs[name])})"
        if name not in table:
            yield f"# {toml_key(name)} ="
        elif table[name] or name != "name":  # without a name, the settings are for the component of the algorithm
            yield _assignment(path, name, table[name])
    if commented and known is None and component.name not in ("", "env", OWN, AUTO):
        yield f"# for its settings, type: rollouts plugins show {component.name}"
