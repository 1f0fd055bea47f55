"""A Resolved as the text of a settings file: whole, so that running the file again repeats the run.

With `commented`, every setting is explained: what it is, its type, its default. Components' settings can be explained
where their signatures are given; nothing is imported here to find them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollouts.config.convert import default_text
from rollouts.config.environments import holds_several, written_weight
from rollouts.config.flags import flag_name
from rollouts.config.merging import Component, settings_path
from rollouts.config.resolving import Resolved
from rollouts.config.settings import (
    AUTO,
    COMPONENT_KINDS,
    EVAL,
    MULTIPLE,
    OWN,
    WEIGHTED,
    SettingInfo,
    Settings,
    setting_infos,
)
from rollouts.config.values import describe_type, toml_key, toml_value
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from rollouts.plugins.signature import Setting

__all__ = ["to_toml"]

_HEADER = """\
# The settings of a run, whole. `rollouts run FILE` reads them; flags of the command override what stands here.
# `rollouts plugins list` shows the components that can be named; `rollouts plugins show NAME` what each can be told.
"""

_MULTIPLE_NOTE = {
    "env": "Environments, mixed by weight: a [[env]] table each, with name, alias, weight and settings.",
    "reward": "Rewards, mixed by weight. Each has a table of its own: [reward.ALIAS], with name, weight and settings.",
    "shaping": "Shapings of rewards, in their order. Each has a table: [shaping.ALIAS], with name and settings.",
    "filter": "Filters of groups. Each has a table of its own: [filter.ALIAS], with name and settings.",
    "logger": "Loggers. Each has a table of its own: [logger.ALIAS], with name and settings.",
}

Settings_ = Mapping[tuple[str, ...], Sequence["Setting"]]


def to_toml(resolved: Resolved, commented: bool = False, signatures: Settings_ | None = None) -> str:
    """The whole file. `signatures` maps a component's path (see `settings_path`) to its settings, for their comments.

    Raises ConfigError for a component's setting that no file can hold.
    """
    signatures = signatures or {}
    lines: list[str] = _HEADER.splitlines() if commented else []
    group = ""
    is_evaluation = resolved.settings.mode == "eval"  # it has no settings of training
    for info in setting_infos():
        if _has_table(info.name, resolved) or (is_evaluation and info.name not in EVAL):
            continue
        if commented and info.group != group:
            group = info.group
            lines += ["", f"# ---- {group} ----"]
        lines += _core_lines(info, resolved.settings, commented)
    if resolved.settings.template:
        lines += ["", *(["# Arguments of the chat template."] if commented else []), "[template]"]
        lines += [_assignment(("template",), key, value) for key, value in resolved.settings.template.items()]
    if resolved.settings.sft:
        lines += ["", *(["# The supervised phase, where it differs."] if commented else [])]
        lines += _tree_lines("sft", resolved.settings.sft)
    for key in COMPONENT_KINDS:
        if is_evaluation and key not in EVAL:
            continue
        if commented and key in _MULTIPLE_NOTE and any(each.alias for each in resolved.components[key]):
            lines += ["", f"# {_MULTIPLE_NOTE[key]}"]
        for component in resolved.components[key]:
            known = signatures.get(settings_path(key, component))
            lines += ["", *_component_lines(key, component, commented, known)]
    if resolved.settings.schedule and commented:
        lines += ["", "# What changes at a step, and stays so from then on."]
    for table in resolved.settings.schedule:
        lines += ["", *_schedule_lines(table)]
    return "\n".join(lines).strip("\n") + "\n"


def _has_table(name: str, resolved: Resolved) -> bool:
    """Whether a setting is written as tables further down instead of a line at the top."""
    if name in COMPONENT_KINDS:
        return bool(resolved.components[name])
    return name in ("schedule", "sft", "template") and bool(getattr(resolved.settings, name))


def _core_lines(info: SettingInfo, settings: Settings, commented: bool) -> Iterator[str]:
    value = getattr(settings, info.name)
    if commented:
        kind = f" One of: {', '.join(info.choices)}." if info.choices else ""
        yield f"# {info.doc}{kind} Default: {info.default_text}."
    yield f"{info.name} = {toml_value(value)}"


def _assignment(path: tuple[str, ...], key: str, value: Any) -> str:
    try:
        return f"{toml_key(key)} = {toml_value(value)}"
    except TypeError as error:
        raise ConfigError(
            f"{flag_name((*path, key))}: {error}, so the run's settings could not be written down"
        ) from error


def _schedule_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """One table of the schedule."""
    yield "[[schedule]]"
    yield from _inside_lines("schedule", table)


def _tree_lines(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    """A table of settings that may name components."""
    yield f"[{name}]"
    yield from _inside_lines(name, table)


def _inside_lines(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    """What is in such a table: plain values first, then a table for each component."""
    for key, value in table.items():
        if not isinstance(value, Mapping) or not value:
            yield _assignment((name,), key, value)
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            nested = key in MULTIPLE or (key == "env" and holds_several(dict(value)))
            yield from _table_lines((name, key), value, nested=nested)


def _table_lines(path: tuple[str, ...], table: Mapping[str, Any], *, nested: bool) -> Iterator[str]:
    """A component's table; `nested`: a table of such tables by alias."""
    if nested and table:
        for alias, inner in table.items():
            yield from _table_lines((*path, alias), inner, nested=False)
        return
    yield "[" + ".".join(toml_key(part) for part in path) + "]"
    for key, value in table.items():
        yield _assignment(path, key, value)


def _component_lines(key: str, component: Component, commented: bool, known: Sequence[Setting] | None) -> Iterator[str]:
    path = settings_path(key, component)
    infos = {info.name: info for info in setting_infos()}
    if commented and not component.alias:
        yield f"# {infos[key].doc} Default: {infos[key].default_text}."
    yield "[[env]]" if key == "env" and component.alias else "[" + ".".join(toml_key(part) for part in path) + "]"
    if component.name:
        yield f"name = {toml_value(component.name)}"
    if key == "env" and component.alias:
        yield f"alias = {toml_value(component.alias)}"
    if key in WEIGHTED and component.alias:
        yield f"weight = {toml_value(written_weight(component.weight))}"
    docs = {setting.name: setting for setting in known or ()}
    names = [*docs, *(name for name in component.settings if name not in docs)]
    for name in names:
        if commented and name in docs:
            yield _comment(docs[name])
        if name in component.settings:
            yield _assignment(path, name, component.settings[name])
        elif commented:
            yield f"# {toml_key(name)} ="
    if commented and known is None and component.name not in ("", "env", OWN, AUTO):
        yield f"# its settings: rollouts plugins show {component.name}"


def _comment(setting: Setting) -> str:
    from rollouts.plugins.signature import REQUIRED

    default = "no default" if setting.default is REQUIRED else f"default {default_text(setting.default)}"
    doc = " ".join(setting.doc.split())
    return f"# {doc}{' ' if doc else ''}({describe_type(setting.type)}; {default})"
