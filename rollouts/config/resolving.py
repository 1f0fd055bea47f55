"""Check and convert a merged tree of settings. The result is a `Resolved`. Unknown settings are refused.

`merging.py` merges trees. `convert.py` converts the settings of components.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.config.convert import convert_value, unflagged
from rollouts.config.files import NOWHERE, Source, check_tree, load_file, refused, runs_inside, unknown_key, walk, where
from rollouts.config.flags import Tree
from rollouts.config.merging import Component, component_names, components_of, merge
from rollouts.config.paths import CONFIG, Move
from rollouts.config.schedule import check_schedule, scheduled_parts
from rollouts.config.secrets import (
    components_without_secrets,
    refuse_left_out,
    tree_without_secrets,
    with_secrets_of_run,
)
from rollouts.config.settings import (
    COMPONENT_KINDS,
    EVAL,
    EVAL_DEFAULTS,
    EVAL_ONLY,
    SAMPLING,
    SFT,
    Setting,
    Settings,
    setting_infos,
)
from rollouts.config.stopping import misspelled, read_ranking, read_rule
from rollouts.config.workers import read_workers
from rollouts.errors import ConfigError, in_lines, near_misses

EXPORTED = "rollouts.toml"
"""The file in an exported model's folder with the settings of its run."""


OWN_ONLY = ("mode", "inference", "logger", "out")
"""The settings of an evaluation that a run with `--from` does not take from the run that it reads."""

HOLDING_OUT = ("seed", "eval_tasks")
"""The settings that determine which tasks are held out. The evaluation of a run takes them from that run."""

_TABLES = {
    "template": "--template.enable-thinking false",
    "sft": "--sft.steps 50",
    "role": "--role.NAME.model MODEL",
}
"""The core settings that are tables, each with an example."""


class Resolved(NamedTuple):
    """The checked settings of a run. `source` is its settings file, for error messages. Comparisons ignore `source`."""

    settings: Settings
    components: dict[str, list[Component]]
    source: Source = NOWHERE

    def without_secrets(self) -> Resolved:
        """A copy with LEFT_OUT in place of every secret of a component."""
        core = tree_without_secrets({"schedule": self.settings.schedule, "sft": self.settings.sft})
        settings = dataclasses.replace(self.settings, schedule=tuple(core["schedule"]), sft=core["sft"])
        components = {key: components_without_secrets(chosen) for key, chosen in self.components.items()}
        return self._replace(settings=settings, components=components)


def moved(resolved: Resolved, move: Move) -> Resolved:
    """The same settings with other paths."""

    def moved_one(key: str, each: Component) -> Component:
        name, weight = (move.value((key, part), getattr(each, part)) for part in ("name", "weight"))
        return each._replace(name=name, weight=weight, settings=move.value((key,), each.settings))

    core = {each.name: getattr(resolved.settings, each.name) for each in dataclasses.fields(Settings)}
    components = {key: [moved_one(key, each) for each in chosen] for key, chosen in resolved.components.items()}
    return resolved._replace(settings=Settings(**move.tree(core)), components=components)


def merge_over_file(file: Tree, *given: Tree, source: Source = NOWHERE) -> Tree:
    """The `given` settings, merged over those of a file. An evaluation does not take SAMPLING from the file of a
    training run: its numbers are then those of the run's own evaluations.
    """
    merged, mode = merge(file, *given, source=source), file.get("mode")
    is_of_training = mode != "eval" and (mode is not None or not file.keys() <= set(EVAL))
    if unflagged(merged.get("mode")) == "eval" and is_of_training:
        return merge({key: value for key, value in file.items() if key not in SAMPLING}, *given)
    return merged


def resolve(tree: Tree, source: Source = NOWHERE, *, allow_left_out: bool = False) -> Resolved:
    """Check and convert a merged tree of settings, and add the defaults. `source` is the tree's file, for error
    messages.

    The settings of components are not converted; `convert_settings` does that later. An evaluation of a run takes the
    seed and the number of held-out tasks from the settings file of that run. With `allow_left_out`, a secret that is
    missing from the file is no error. Use this to read a run, not to start one.

    Raises ConfigError for an unknown setting, a wrong type, a value out of bounds, and settings of a component that is
    not chosen.
    """
    check_tree(tree, source)
    infos = {info.name: info for info in setting_infos()}
    _refuse_unknown(tree, infos, source)
    mode = unflagged(tree["mode"]) if tree.get("mode") is not None else "rl"
    if mode == "eval":
        tree = _with_settings_of_run(_of_evaluation(tree, source))
        infos["temperature"] = infos["temperature"]._replace(minimum=0.0, above=-math.inf)  # 0: greedy
    elif unflagged(tree.get("from_run")) and not allow_left_out:  # its file has all settings, also if that run is gone
        tree = _from_saved(tree, mode, source)
    tree = with_secrets_of_run(tree)
    if not allow_left_out:
        refuse_left_out(tree, source)
    defaults: Tree = {key: infos[key].default for key in COMPONENT_KINDS}
    if mode == "sft":
        defaults["loss"] = "sft"
    if merge({"data": tree.get("data")})["data"].get("name"):
        if mode != "sft":
            defaults["env"] = "prompts"  # the default environment for the rows of a file
        elif tree.get("env") is None:
            tree = dict(tree)
            tree.setdefault("eval_tasks", 0)  # conversations alone have no tasks
    if isinstance(tree.get("optimizer"), dict):
        defaults["optimizer"] = "adamw"  # `--optimizer.betas` alone is a setting of the usual one
    chosen = merge(defaults, {key: value for key, value in tree.items() if key in COMPONENT_KINDS})
    chosen["logger"] = _with_own_logger(chosen["logger"])
    values = {
        name: _core_value(tree[name], info, source)
        for name, info in infos.items()
        if name in tree and name not in COMPONENT_KINDS
    }
    if mode == "eval":
        values = EVAL_DEFAULTS | values
    components = components_of(chosen, COMPONENT_KINDS, source)
    settings = Settings(**values, **component_names(components))
    for error in _faults(settings, tree, source):
        raise error
    scheduled_parts(components, settings.schedule, source)  # raises ConfigError for an invalid schedule
    return Resolved(settings, components, source)


def _with_own_logger(loggers: Tree) -> Tree:
    """The tables of loggers with the run's own, which writes metrics.jsonl, unless there is none at all. A table of its
    alias without a name has its settings.

    >>> _with_own_logger({"wandb": {"name": "wandb"}})
    {'jsonl': {'name': 'jsonl'}, 'wandb': {'name': 'wandb'}}
    """
    (own,) = Settings.logger
    names = [unflagged(table["name"]) for table in loggers.values() if "name" in table]
    if not names or own in names:
        return loggers
    return {own: {"name": own, **loggers.get(own, {})}} | {key: each for key, each in loggers.items() if key != own}


def _of_evaluation(tree: Tree, source: Source) -> Tree:
    """The settings of an evaluation. Training settings in a file are dropped, so that you can pass the file of a
    training run. Training settings given as flags raise ConfigError.
    """
    for key, value in tree.items():
        if key not in EVAL and (place := where((key,), value, source)).startswith("--"):
            why = "this is a setting of training, and an evaluation trains nothing; leave it out"
            listing = "`rollouts eval --help` lists the settings of an evaluation"
            raise ConfigError(f"{place.removesuffix('.name')}: {why}\n{listing}")
    return {key: value for key, value in tree.items() if key in EVAL}


def _from_saved(tree: Tree, mode: Any, source: Source) -> Tree:
    """The settings of a run on saved trajectories: the environment, the model, the template and all other settings of
    episodes are those of the first run of `from_run`, unless they are given. The folders become absolute.

    Raises ConfigError for another mode, and for settings of sampling, because nothing is sampled.
    """
    if mode != "rl":
        again = "leave one of them out; to train on the good rollouts alone, type: --loss rft"
        raise refused(("from_run",), tree["from_run"], source, f"a run of mode {mode} reads no trajectories", again)
    for name in ("over_sampling", "refill", "staleness"):
        if unflagged(tree.get(name)) not in (None, getattr(Settings, name)):
            raise refused((name,), tree[name], source, "with --from nothing is sampled; leave it out")
    given = unflagged(tree["from_run"])
    for value in (runs := given if isinstance(given, list | tuple) else [given]):
        if not isinstance(value, str) or not value:
            raise ConfigError(f"--from {value}: expected the folder of a run")
    folders = [str(saved_folder(run)) for run in runs]
    run, _ = load_file(Path(folders[0]) / CONFIG)
    return merge({key: run[key] for key in run if key in EVAL and key not in OWN_ONLY}, tree | {"from_run": folders})


def _refuse_unknown(tree: Tree, known: Iterable[str], source: Source) -> None:
    for key in (key for key in tree if key not in known):
        hint = _hint_inside({"": tree[key]}) or _hint_inside({key: None})
        listing = in_lines(
            "" if hint or near_misses(key, known) else f"the core's settings: {', '.join(sorted(known))}",
            "write a component's settings in its table ([loss] clip_high = 0.28) or as flags (--loss.clip-high 0.28)",
        )
        problem = in_lines(f"there is no setting {key!r}", hint)
        raise unknown_key((key,), tree[key], source, problem, () if hint else known, listing)


def _hint_inside(table: Tree) -> str:
    """The hint for a table with settings of another library: `trainer.n_gpus`."""
    from rollouts.config.foreign import foreign_hint

    return next((hint for path, _, _ in walk(table) if path and (hint := foreign_hint(path[-1]))), "")


def _core_value(value: Any, info: Setting, source: Source, place: tuple[str, ...] = ()) -> Any:
    """The converted value of one core setting. `place` is the path of its table."""
    path = (*place, info.name)
    if info.name == "schedule":
        return check_schedule(value, source)
    if info.name == "worker":
        return read_workers(value, source)
    if info.name in _TABLES:
        if not isinstance(value, dict):
            raise refused(path, value, source, f"expected a table, such as `{_TABLES[info.name]}`")
        if info.name == "sft":
            return _sft(value, source)
        for name, inner in value.items() if info.name == "role" else ():
            if not isinstance(inner, dict):
                hint = f"type: --role.{name}.model {unflagged(inner)}"
                raise refused((*path, name), inner, source, "expected the settings of a role", hint)
        return {key: inner for key, inner in unflagged(value).items() if inner is not None}  # None means: not set
    if isinstance(value, dict):
        hint = _hint_inside({"": value}) or f"type: {info.flag} VALUE"
        raise refused(path, value, source, f"expected one value; `{info.name}` has no settings of its own", hint)
    if info.type is str and unflagged(value) is None:
        return info.default
    if info.name == "stop_when":  # one rule is a list of one
        listed = value if isinstance(value, list | tuple) else [value]
        value = [] if [unflagged(each) for each in listed] in ([None], ["none"]) else listed
    converted = convert_value(value, info.type, path, source)
    if isinstance(converted, int | float) and (fault := _fault_of_number(info, converted)):
        raise refused(path, value, source, f"must be {fault}; got {unflagged(value)}")
    return converted


def _faults(settings: Settings, tree: Tree, source: Source) -> Iterator[ConfigError]:
    """What settings say that is valid alone, but not in this run: rules and metrics that no step can meet, a pattern
    that is none, and settings of another mode.
    """

    def of_setting(name: str, *lines: str) -> ConfigError:
        return refused((name,), tree[name], source, *lines)

    for name, read, texts in (
        ("stop_when", read_rule, settings.stop_when),
        ("keep_best", read_ranking, (settings.keep_best,) if settings.keep_best else ()),
    ):
        for text in texts:
            try:
                lines = _metric_fault(text, read(text).metric, settings)
            except ConfigError as error:
                lines = (str(error),)
            if lines:
                yield of_setting(name, *lines)
    for name in EVAL_ONLY if settings.mode != "eval" else ():
        if getattr(settings, name) != getattr(Settings, name):
            other = "tasks of an evaluation, and a run trains on all of its tasks"
            several = "evaluations with several samples of each task"
            why = f"this setting chooses the {other}" if name == "tasks" else f"this setting is for {several}"
            yield of_setting(name, why, "leave it out, or type: rollouts eval")
    try:
        re.compile(settings.answer_pattern)
    except re.error as error:
        yield of_setting("answer_pattern", f"{settings.answer_pattern!r} is no regular expression: {error}")
    for first in settings.sft if settings.mode != "sft+rl" else ():
        other = f"this setting is for the supervised phase of mode sft+rl, but the mode of this run is {settings.mode}"
        again = "type: rollouts run --mode sft+rl, or leave it out"
        yield refused(("sft", first), tree["sft"][first], source, other, again)


def _metric_fault(text: str, metric: str, settings: Settings) -> tuple[str, ...]:
    """The lines of an error for a misspelled metric, or for one of evaluations that the run lacks; else none."""
    if meant := misspelled(metric):
        return f"'{text}': no metric is named {metric}", f"did you mean: {meant}?"
    if not metric.startswith("eval/") or (settings.eval_every and settings.eval_tasks):
        return ()
    when = "this run evaluates only before its first step and after its last one"
    lacks = "--eval-tasks with more than 0" if settings.eval_every else "--eval-every 10"
    return f"'{text}' has no effect: {when}", f"type: {lacks}"


def _fault_of_number(info: Setting, number: float) -> str:
    """Describe the bound that a number breaks; empty if the number is valid."""
    if isinstance(number, int) and number.bit_length() >= 64:
        return "less than 2**63"
    if not math.isfinite(number) and not math.isnan(number):
        return "a finite number"
    if not number >= info.minimum or not number > info.above:
        return f"more than {info.above:g}" if math.isfinite(info.above) else f"at least {info.minimum:g}"
    if info.name == "max_failures" and isinstance(number, float) and number >= 1:
        return "a whole number of failed rollouts, such as 20, or a share between 0 and 1, such as 0.5"
    return ""


def _sft(table: Tree, source: Source) -> Tree:
    """The settings of the supervised phase. Core settings are converted; settings that name components are merged."""
    infos = {info.name: info for info in setting_infos()}
    found: Tree = {}
    for key, value in table.items():
        if key not in SFT:
            what = "cannot differ in the supervised phase" if key in infos else "is no setting"
            listing = f"the settings of the supervised phase: {', '.join(SFT)}"
            raise unknown_key(("sft", key), value, source, f"{key!r} {what}", SFT, listing)
        found[key] = value if key in COMPONENT_KINDS else _core_value(value, infos[key], source, ("sft",))
    return found | merge({key: value for key, value in found.items() if key in COMPONENT_KINDS})


def run_settings_file(model: Any) -> Path | None:
    """The settings file of the run whose folder, checkpoint or exported model is `model`; None for other models.

    >>> run_settings_file("tiny") is None
    True
    """
    if not isinstance(model, str) or not model:
        return None
    path = Path(model).expanduser().absolute()
    path = path.parents[1] if path.parent.name == "adapters" else path  # the adapter of a role, in its checkpoint
    folders = [path]
    if path.name == "checkpoints":
        folders.append(path.parent)
    elif path.parent.name == "checkpoints":
        folders.append(path.parents[1])
    files = [path / EXPORTED, *(folder / "config.toml" for folder in folders)]
    return next((file for file in files if file.is_file()), None)


def _with_settings_of_run(tree: Tree) -> Tree:
    """Add the seed and the number of held-out tasks of the evaluated run, unless they are given. If the run held out no
    tasks, the number keeps its default.

    Raises ConfigError if the settings of the run cannot be read.
    """
    file = run_settings_file(unflagged(tree.get("model")))
    if file is None or all(name in tree for name in HOLDING_OUT):
        return tree
    run, _ = load_file(file)
    return {name: run[name] for name in HOLDING_OUT if run.get(name) and name not in tree} | tree


# --- the run that `--from` names --------------------------------------------------------------------------------------


def saved_folder(run: str) -> Path:
    """The folder of the run whose trajectories are meant, as an absolute path: of a run of mode sft+rl, its
    reinforcement. Raises ConfigError if there is no run, or if it is an evaluation or was trained on demonstrations.
    """
    folder = Path(run).expanduser().absolute()
    if (folder / "rl" / CONFIG).is_file():
        folder = folder / "rl"
    if not (folder / CONFIG).is_file():
        inside = runs_inside(Path(run).expanduser())
        hint = f"\ndid you mean: {', '.join(inside[-3:])}?" if inside else "\ngive the folder that a run has written"
        raise ConfigError(f"{run} holds no run: it has no {CONFIG}{hint}")
    mode = load_file(folder / CONFIG)[0].get("mode", "rl")
    if mode != "rl":
        why = {
            "eval": "an evaluation, whose tasks are held out",
            "sft": "a run of mode sft, which saves no trajectories",
        }.get(mode, f"a run of mode {mode} that has not begun to reinforce")
        raise ConfigError(f"{run} holds {why}: give a run of mode rl")
    return folder
