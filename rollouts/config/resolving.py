"""A merged tree of settings into a Resolved: everything checked and converted, and what nothing reads refused.

Left out: merging, and what names components (merging.py); components' own settings (convert.py).
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rollouts.config.convert import convert_value, plain
from rollouts.config.files import NOWHERE, Source, check_tree, where
from rollouts.config.flags import Flag, Tree, flag_name
from rollouts.config.merging import Component, components_of, merge, written_component
from rollouts.config.of_run import with_settings_of_run
from rollouts.config.schedule import check_schedule, scheduled_parts
from rollouts.config.secrets import refuse_left_out, with_secrets_of_run
from rollouts.config.settings import (
    COMPONENT_KINDS,
    EVAL,
    EVAL_DEFAULTS,
    MULTIPLE,
    REPEATED,
    SFT,
    SINGLE,
    SettingInfo,
    Settings,
    setting_infos,
)
from rollouts.errors import ConfigError, near_misses

__all__ = ["Resolved", "component_names", "resolve"]


class Resolved(NamedTuple):
    """Everything a run is composed from. `source` is the file, if any, for messages; comparisons leave it out."""

    settings: Settings
    components: dict[str, list[Component]]
    source: Source = NOWHERE


def resolve(tree: Tree, source: Source = NOWHERE, *, allow_left_out: bool = False) -> Resolved:
    """Check and convert a merged tree (without defaults); `source` is the file it came from, for messages. The
    evaluation of a run takes the seed and the number of held-out tasks from that run's own file.

    With `allow_left_out`, a secret that the file leaves out is no error. Use it to read a run, not to start one.

    Raises ConfigError: an unknown setting, a wrong type, a value out of bounds, a dotted flag for a component that is
    not chosen. Components' settings stay as they are, for `convert_settings`.
    """
    check_tree(tree, source)
    infos = {info.name: info for info in setting_infos()}
    _refuse_unknown(tree, infos, source)
    mode = plain(tree["mode"]) if tree.get("mode") is not None else "rl"
    if mode == "eval":
        tree = with_settings_of_run(_of_evaluation(tree, source))
        infos["temperature"] = infos["temperature"]._replace(minimum=0.0, above=-math.inf)  # 0: greedy
    tree = with_secrets_of_run(tree)
    if not allow_left_out:
        refuse_left_out(tree, source)
    defaults: Tree = {key: _default_list(infos[key].default) for key in COMPONENT_KINDS}
    if mode == "sft":
        defaults["loss"] = "sft"
    chosen = merge(defaults, {key: value for key, value in tree.items() if key in COMPONENT_KINDS})
    hints = typing.get_type_hints(Settings)
    values = {
        name: _core_value(tree[name], hints[name], info, source)
        for name, info in infos.items()
        if name in tree and name not in COMPONENT_KINDS
    }
    if mode == "eval":
        values = EVAL_DEFAULTS | values
    components = components_of(chosen, COMPONENT_KINDS, source)
    settings = Settings(**values, **component_names(components))
    if settings.sft and settings.mode != "sft+rl":
        first = next(iter(settings.sft))
        raise ConfigError(
            f"{where(('sft', first), tree['sft'][first], source)}: it is for the supervised phase of mode sft+rl, and "
            f"this run is of mode {settings.mode}\ntype: rollouts run --mode sft+rl, or leave it out"
        )
    scheduled_parts(components, settings.schedule, source)  # a table that chooses nothing is told here, not later
    return Resolved(settings, components, source)


def _of_evaluation(tree: Tree, source: Source) -> Tree:
    """What matters to an evaluation: so that the file of a training run can be given as it is. What was typed is
    refused where it is of training.
    """
    for key, value in tree.items():
        place = where((key,), value, source)
        if key not in EVAL and place.startswith("--"):
            raise ConfigError(
                f"{place.removesuffix('.name')}: an evaluation trains nothing, and this is a setting of training; "
                "leave it out\n`rollouts eval --help` lists the settings of an evaluation"
            )
    return {key: value for key, value in tree.items() if key in EVAL}


def component_names(components: Mapping[str, list[Component]]) -> dict[str, Any]:
    """What the settings that name components say, as `Settings` holds it."""
    named: dict[str, Any] = {key: next((each.name for each in components[key]), "") for key in SINGLE}
    for key in REPEATED:
        if key in MULTIPLE or any(each.alias for each in components[key]):
            named[key] = tuple(written_component(key, each) for each in components[key])
    return named


def _default_list(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


def _refuse_unknown(tree: Tree, known: Iterable[str], source: Source) -> None:
    known = list(known)
    for key, value in tree.items():
        if key in known:
            continue
        place = where((key,), value, source)
        near = near_misses(key, known)
        written = near
        if place.startswith("--"):
            rest = place[len(flag_name((key,))) :]
            written = [flag_name((name,)) + rest for name in near]
        hint = f"\ndid you mean: {', '.join(written)}?" if near else ""
        raise ConfigError(
            f"{place}: there is no setting {key!r}{hint}\nthe core's settings: {', '.join(sorted(known))}\n"
            "a component's settings go into its table ([loss] clip_high = 0.28) or dotted flags (--loss.clip-high 0.28)"
        )


def _core_value(value: Any, hint: Any, info: SettingInfo, source: Source, place: tuple[str, ...] = ()) -> Any:
    """The value of one core setting; `place` is the table in which it stands."""
    path = (*place, info.name)
    if info.name == "template":
        return _template(value, source)
    if info.name == "schedule":
        return check_schedule(value, source)
    if info.name == "sft":
        return _sft(value, source)
    if isinstance(value, dict):
        raise ConfigError(f"{where(path, value, source)}: `{info.name}` is one value and has no settings of its own")
    if hint is str and (value is None or (isinstance(value, Flag) and value.value is None)):
        return info.default
    converted = convert_value(value, hint, path, source)
    if isinstance(converted, int | float):
        if isinstance(converted, int) and converted.bit_length() >= 64:
            raise ConfigError(f"{where(path, value, source)}: must be less than 2**63; got {plain(value)}")
        if not math.isfinite(converted) or converted < info.minimum or converted <= info.above:
            bound = f"more than {info.above:g}" if math.isfinite(info.above) else f"at least {info.minimum:g}"
            raise ConfigError(f"{where(path, value, source)}: must be {bound}; got {plain(value)}")
    if info.name == "max_failures" and isinstance(converted, float) and converted >= 1:
        raise ConfigError(
            f"{where(path, value, source)}: must be a whole number of failed rollouts, such as 20, or a share between "
            f"0 and 1, such as 0.5; got {plain(value)}"
        )
    return converted


def _template(value: Any, source: Source) -> dict[str, Any]:
    """Free arguments; one that is None is not passed on."""
    if not isinstance(value, dict):
        example = "--template.enable-thinking false"
        raise ConfigError(f"{where(('template',), value, source)}: expected a table, such as `{example}`")
    return {key: inner for key, inner in plain(value).items() if inner is not None}


def _sft(value: Any, source: Source) -> Tree:
    """The settings of the supervised phase: core ones converted, those that name components as they were given."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where(('sft',), value, source)}: expected a table, such as `--sft.steps 50`")
    hints = typing.get_type_hints(Settings)
    infos = {info.name: info for info in setting_infos()}
    found: Tree = {}
    for key, inner in value.items():
        if key not in SFT:
            raise _not_in_sft(key, inner, infos, source)
        is_core = key not in COMPONENT_KINDS
        found[key] = _core_value(inner, hints[key], infos[key], source, ("sft",)) if is_core else inner
    tables = merge({key: inner for key, inner in found.items() if key in COMPONENT_KINDS})
    return found | tables


def _not_in_sft(key: str, value: Any, known: Iterable[str], source: Source) -> ConfigError:
    near = near_misses(key, SFT)
    place = where(("sft", key), value, source)
    if near:
        is_flag = place.startswith("--")
        hint = f"did you mean: {', '.join(flag_name(('sft', name)) if is_flag else name for name in near)}?\n"
    else:
        hint = ""
    what = "is the same in both phases, or is for rollouts" if key in known else "is no setting"
    return ConfigError(f"{place}: {key!r} {what}\n{hint}the supervised phase has: {', '.join(SFT)}")
