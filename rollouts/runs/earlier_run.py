"""What a plan has to know of an earlier run: the run that wrote the model that is evaluated, or that a run begins with.

Which of the held-out tasks that run may have trained on, and which of its settings this evaluation does not use.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from rollouts.config.convert import toml_value
from rollouts.config.files import load_file
from rollouts.config.merging import component_names
from rollouts.config.resolving import HOLDING_OUT, Resolved, resolve, run_settings_file
from rollouts.config.secrets import components_without_secrets, leaves_out
from rollouts.errors import ConfigError, UserError
from rollouts.plugins.manager import PluginManager
from rollouts.runs.components import choose, with_data
from rollouts.runs.environments import Environment, held_out_tasks, plan_environments, task_identity
from rollouts.runs.held_objects import give_rows, with_rows
from rollouts.runs.workers import Workers


def run_of(model: str) -> Resolved | None:
    """The settings of the run that wrote this model, without its secrets; None for any other model. Raises
    ConfigError.
    """
    file = run_settings_file(model)
    if file is None:
        return None
    tree, source = load_file(file)
    return resolve(tree, source, allow_left_out=True)


def overlap_notes(
    manager: PluginManager,
    run: Resolved,
    environments: Sequence[Environment],
    resolved: Resolved,
) -> tuple[str, ...]:
    """Notes about tasks of the evaluation that the run may have trained on. Empty if the run held them all out, or did
    not use these environments.
    """
    trained_in = {component.name for component in run.components["env"]}
    own = [env for env in environments if env.name in trained_in]
    here, there = ({name: getattr(each, name) for name in HOLDING_OUT} for each in (resolved.settings, run.settings))
    differing = [
        f"{name} is {here[name]} and was {there[name]} in the run" for name in HOLDING_OUT if here[name] != there[name]
    ]
    components = resolved.components["env"]
    try:
        give_rows(manager, resolved, with_rows(run))
        workers = Workers(run, manager)
        run = with_data(run, manager, workers)
        theirs_given = run.components["env"]
        if components_without_secrets(components) == components_without_secrets(theirs_given):
            theirs_given = list(components)  # the same components, with the secrets that the run's file does not have
        else:
            differing.append("the environment or its settings are not those of the run")
        if not own or not differing:
            return ()
        if leaves_out([each.settings for each in theirs_given]):
            raise ConfigError(f"{run.source.path} leaves out a secret of the environment")
        chosen = choose(manager, {"env": theirs_given}, run.source, workers=workers)["env"]
        theirs = plan_environments(manager, theirs_given, chosen, run.settings, run.source)
        held_out = {task_identity(task) for task in held_out_tasks(theirs, run.settings.eval_tasks)}
        aliases = {env.alias for env in own}
        asked = [task for task in held_out_tasks(environments, resolved.settings.eval_tasks) if task.env in aliases]
    except UserError as error:
        return (f"which of these tasks the run held out is not known: {error}",)
    unseen = sum(task_identity(task) in held_out for task in asked)
    words = f": it held out {unseen} of these {len(asked)} tasks, and may have trained on the others"
    return ("; ".join(differing) + (words if unseen < len(asked) else ""),)


def trained_before(manager: PluginManager, environments: Sequence[Environment], resolved: Resolved) -> tuple[str, ...]:
    """Notes about held-out tasks of a training run that begins with the model of another run. That run may have trained
    on them.
    """
    model = resolved.settings.model
    try:
        run = run_of(model)
    except UserError as error:
        return (f"--model {model}: the settings of its run cannot be read: {error}",)
    notes = () if run is None else overlap_notes(manager, run, environments, resolved)
    return tuple(f"--model {model} comes from a run; {note}" for note in notes)


def unused_of_run(run: Resolved, resolved: Resolved, model: str) -> tuple[str, ...]:
    """What decided the run's own numbers, and is not used in this evaluation of `model`, in words; nothing where the
    run never saw these environments, or where its own file gave the settings, so that only what was typed differs.
    """
    if os.path.abspath(resolved.source.path) == run.source.path:
        return ()
    here, there = (dict.fromkeys(each.name for each in of.components["env"]) for of in (resolved, run))
    if here.keys().isdisjoint(there):
        return ()
    ours, theirs = (component_names(of.components)["reward"] or ("env:1",) for of in (resolved, run))
    unused = [f"--reward {name}" for name in theirs] if ours != theirs else []
    ours, theirs = (component_names(of.components)["tool"] for of in (resolved, run))
    unused += [f"--tool {name}" for name in theirs if name not in ours]
    for key in ("env", "tool", "reward"):
        known = {
            (each.alias, each.name): each.settings for each in components_without_secrets(resolved.components[key])
        }
        for component in components_without_secrets(run.components[key]):
            settings = known.get((component.alias, component.name), component.settings)
            place = ".".join(filter(None, (key, component.alias)))
            unused += [
                f"{place}.{name} = {toml_value(value)}"
                for name, value in component.settings.items()
                if settings.get(name) != value
            ]
    for name in ("system", "template", "tool_parser", "max_tokens", "max_turns"):
        value = getattr(run.settings, name)
        unused += [f"{name} = {toml_value(value)}"] if getattr(resolved.settings, name) != value else []
    if not unused:
        return ()
    folder = Path(run.source.path).parent
    again = f"rollouts eval {shlex.quote(os.path.relpath(folder))}"
    again += "" if Path(model).absolute() == folder else f" --model {shlex.quote(model)}"
    them = "it" if len(unused) == 1 else "them"
    return (f"the run used {', '.join(unused)}, which this evaluation does not use; to use {them}, type: {again}",)
