"""Write resolved settings as the text of a settings file. `rollouts run FILE` with that file repeats the run.

With `commented`, each setting has a comment with its description, type and default. For the settings of components,
pass their signatures: this module imports no component.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollouts.config.convert import default_text, describe_type, toml_key, toml_value
from rollouts.config.flags import flag_name
from rollouts.config.merging import Component, by_alias, component_table, settings_path
from rollouts.config.objects import origin_of
from rollouts.config.resolving import Resolved
from rollouts.config.settings import (
    AUTO,
    COMPONENT_KINDS,
    EVAL,
    FILE_ONLY,
    OWN,
    Setting,
    setting_infos,
)
from rollouts.errors import ConfigError

_HEADER = """\
# All settings of a run, for `rollouts run FILE`. Flags of the command override the settings in this file.
# `rollouts plugins list` lists the components that you can name. `rollouts plugins show NAME` lists their settings.
"""

_MULTIPLE_NOTE = {
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
    left_out = _same(resolved, differing_from) if differing_from is not None else set()
    settings = resolved.settings
    infos = [info for info in setting_infos() if info.name in EVAL or settings.mode != "eval"]
    sections = [_HEADER.splitlines() if commented else []]
    group = ""
    for info in infos:
        value = getattr(settings, info.name)
        if info.name in left_out or (
            resolved.components[info.name]
            if info.name in COMPONENT_KINDS
            else info.name in ("worker", *FILE_ONLY) and value
        ):
            continue  # written below as a table
        if commented and info.group != group:
            sections.append([f"# ---- {info.group} ----"])
            group = info.group
        sections[-1] += [*([_explained(info)] if commented else []), f"{info.name} = {toml_value(value)}"]
    if settings.template:
        note = ["# Arguments of the chat template."] if commented else []
        sections.append([*note, *_table_lines(("template",), settings.template)])
    if settings.worker:
        note = ["# Where environments run."] if commented else []
        sections.append([*note, "[worker]", *_inside_lines("worker", settings.worker)])
    if settings.role:
        note = ["# Roles that another model plays."] if commented else []
        tables = [line for name, table in settings.role.items() for line in _table_lines(("role", name), table)]
        sections.append([*note, *tables])
    if settings.sft:
        note = ["# Settings that differ in the supervised phase."] if commented else []
        sections.append([*note, "[sft]", *_inside_lines("sft", settings.sft)])
    named = {info.name: info for info in infos}
    for key in (key for key in COMPONENT_KINDS if key in named and key not in left_out):
        chosen = resolved.components[key]
        if commented and key in _MULTIPLE_NOTE and any(each.alias for each in chosen):
            sections.append([f"# {_MULTIPLE_NOTE[key]}"])
        for component in chosen:
            known = (signatures or {}).get(settings_path(key, component))
            held = resolved.source.objects.components.get(component.name)
            origin = [f"# {origin_of(held)}"] if held is not None else []
            sections.append([*origin, *_component_lines(named[key], component, commented, known)])
    if settings.schedule and commented:
        sections.append(["# Changes from a step on."])
    sections += [["[[schedule]]", *_inside_lines("schedule", table)] for table in settings.schedule]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _same(resolved: Resolved, other: Resolved) -> set[str]:
    """The names of the settings that are the same in both, those of components with their settings."""

    def value_of(name: str, given: Resolved) -> Any:
        return given.components[name] if name in COMPONENT_KINDS else getattr(given.settings, name)

    names = [info.name for info in setting_infos()]
    return {name for name in names if value_of(name, resolved) == value_of(name, other)}


def _explained(info: Setting) -> str:
    kind = f" One of: {', '.join(info.choices)}." if info.choices else ""
    return f"# {info.doc}{kind} Default: {info.default_text}."


def _assignment(path: tuple[str, ...], key: str, value: Any) -> str:
    try:
        return f"{toml_key(key)} = {toml_value(value)}"
    except TypeError as error:
        raise ConfigError(
            f"{flag_name((*path, key))}: {error}, so the settings of the run cannot be written to a file"
        ) from error


def _inside_lines(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    """The content of a table that may name components: plain values first, then a table for each component."""
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
