"""What a plan has to know of an earlier run: the run that wrote the model that is evaluated, or that a run begins with.

Which of the held-out tasks that run may have trained on, and which of its settings this evaluation does not use.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from rollouts.config.convert import toml_value
from rollouts.config.files import load_file, runs_inside
from rollouts.config.merging import component_names
from rollouts.config.resolving import HOLDING_OUT, Resolved, resolve, run_settings_file
from rollouts.config.secrets import components_without_secrets, leaves_out
from rollouts.config.settings import Settings
from rollouts.errors import ConfigError, UserError
from rollouts.inference.chatting import is_evaluation_only
from rollouts.models import folders, loading
from rollouts.models.folders import all_checkpoints, nearest_checkpoints
from rollouts.plugins.manager import PluginManager
from rollouts.runs.components import Chosen, choose, with_data
from rollouts.runs.environments import Environment, held_out_tasks, plan_environments, task_identity
from rollouts.runs.folder import CONFIG, PHASES, SUMMARY, holds_run, load_config, read_json, writer_of
from rollouts.runs.held_objects import give_rows, with_rows
from rollouts.runs.workers import Workers
from rollouts.training.weights.store import STATE, check_folder, newest_checkpoint


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


# --- its model --------------------------------------------------------------------------------------------------------


def is_of_run(source: str) -> bool:
    """Whether this names the folder of a run, or a run's `checkpoints/`, and not a model."""
    path = Path(source).expanduser()
    if not source or source in loading.BUNDLED or not path.is_dir():
        return False
    is_model = (path / "config.json").is_file() or folders.is_adapter(path)
    return not is_model and (holds_run(path) or bool(all_checkpoints(path)))


def is_written_by_run(folder: Path) -> bool:
    """Whether this is a checkpoint or an adapter. Servers are usually not started with these."""
    return (folder / STATE).exists() or folders.is_adapter(folder)


def find_checkpoint(source: str) -> Path:
    """The folder with the weights: `source` itself, or the newest checkpoint of the run in it. For a run of mode
    sft+rl, the newest checkpoint of the last phase that has one. Raises ConfigError.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        hint = nearest_checkpoints(path) or "give the folder of a run, a checkpoint, a model or a LoRA adapter"
        raise ConfigError(f"{source} {what}; {hint}")
    if (path / "config.json").is_file() or folders.is_adapter(path) or folders.role_adapters(path):
        return path
    phases = [path / phase for phase in PHASES if (path / phase).is_dir()]  # of a run of mode sft+rl
    for run in (*phases, path):
        found = newest_checkpoint(run / "checkpoints") or newest_checkpoint(run)
        if found is not None:
            return found
    summary = read_json(path / SUMMARY)
    if "episodes_asked" in summary:
        again = shlex.quote(str(path / CONFIG))
        raise ConfigError(
            f"{source} is the folder of an evaluation, which writes no model; give the model that it evaluated, "
            f"{summary['model']}\nto repeat the evaluation, type: rollouts eval {again}"
        )
    if holds_run(path):
        if writer := writer_of(path):
            first = _first_checkpoint(next(filter(holds_run, phases), path))
            raise ConfigError(f"the run in {source} is still running ({writer}), and has no checkpoint yet\n{first}")
        raise ConfigError(f"the run in {source} has no checkpoint yet; to continue it, type: rollouts resume {source}")
    runs = runs_inside(path)
    give = "give a folder that a run wrote, such as runs/first or runs/first/checkpoints/step_000120"
    advice = f"\ndid you mean: {', '.join(runs[:3])}?" if runs else f"; {give}"
    raise ConfigError(f"the folder {source} holds no run, no checkpoint, no model and no adapter{advice}")


def _first_checkpoint(run: Path) -> str:
    """When a run writes its first checkpoint."""
    tree, _ = load_config(run)
    steps, every, seconds = (
        tree.get(name, getattr(Settings, name)) for name in ("steps", "checkpoint_every", "checkpoint_seconds")
    )
    of = f" of the phase {run.name}" if run.name in PHASES else ""
    at = f"its first checkpoint comes after step {min(every or steps, steps)} of {steps}{of}"
    return f"{at}, or earlier, {seconds:g} seconds after its begin" if seconds and not every else at


def evaluated(settings: Settings, inference: Chosen) -> tuple[Settings, tuple[str, ...]]:
    """The settings of an evaluation, with the checkpoint's path as the model, and notes about what will be evaluated.
    Raises ConfigError.
    """
    if is_evaluation_only(inference.component):  # only the server knows its models
        if settings.template:
            name = next(iter(settings.template))
            raise ConfigError(
                f"--template.{name.replace('_', '-')}: with --inference {inference.name} the server applies "
                "the chat template, not rollouts; vLLM and SGLang take the argument in the request: "
                f"--inference.body '{{chat_template_kwargs = {{{name} = ...}}}}'"
            )
        return settings, ()
    given = settings.model
    path = Path(given).expanduser()
    if not path.is_dir():  # not a folder but a name, which the engine resolves
        return settings, _check_served(given, given, inference, of_run=False)
    found = find_checkpoint(given)
    if (found / STATE).exists():
        check_folder(str(found))
    model = given if found == path else str(found)
    notes = [] if found == path else [f"{given} is a run's folder: its newest checkpoint is used, {found.name}"]
    served = _check_served(given, model, inference, of_run=found != path or is_written_by_run(path))
    return dataclasses.replace(settings, model=model), (*notes, *served)


def _check_served(given: str, model: str, inference: Chosen, *, of_run: bool) -> tuple[str, ...]:
    """Check that a server at a URL serves --model, and note what cannot be checked. An evaluation sends no weights, so
    the server keeps the weights that it loaded at its start. If a run wrote the model, the user must confirm that the
    server loaded it.

    Raises ConfigError.
    """
    url, name = inference.settings.get("url"), inference.settings.get("served_model")
    if not url or name is None:
        return ()
    if name:
        place = url if isinstance(url, str) else ",".join(url)
        return (f"what is evaluated is what {place} serves as {name!r}; that this is {model} is not checked",)
    if not of_run:
        return ()
    raise ConfigError(
        f"--model {given} with --inference.url: an evaluation sends no weights to a running server, so "
        "the results would be those of the model that the server has loaded. Leave --inference.url out, and a server "
        f"is started with {given}; or export it (`rollouts export {shlex.quote(given)} FOLDER`), start the server with "
        "the exported folder, and type --inference.served-model NAME with the server's name for the model"
    )
