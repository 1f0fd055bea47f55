"""What a plan has to know of the run that wrote its model: where the checkpoint is, and which settings differ."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollouts.config.convert import toml_value
from rollouts.config.files import load_file, runs_inside
from rollouts.config.merging import component_tables
from rollouts.config.resolving import Resolved, resolve, run_settings_file
from rollouts.config.settings import Settings
from rollouts.errors import ConfigError
from rollouts.inference.chatting import is_evaluation_only
from rollouts.models import folders, loading
from rollouts.models.folders import all_checkpoints, nearest_checkpoints
from rollouts.runs.components import Chosen
from rollouts.runs.folder import CONFIG, PHASES, SUMMARY, holds_run, read_json, writer_of
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


def differing_notes(run: Resolved, resolved: Resolved) -> tuple[str, ...]:
    """A note if a run or an evaluation begins with the model of `run`, plays an environment of it, and differs in what
    decides which tasks are held out: training may have used those. Of an evaluation, the note also names what decided
    the run's numbers; where the run's file gave the settings, only what was typed differs.
    """
    evaluates = resolved.settings.mode == "eval"
    plays = evaluates and os.path.abspath(resolved.source.path) != run.source.path
    here, there = (_compared(each.without_secrets(), plays=plays) for each in (resolved, run))
    ours, theirs = ({each.name for each in of.components["env"]} for of in (resolved, run))
    missing = object()
    differing = [f"{name} = {toml_value(value)}" for name, value in there.items() if here.get(name, missing) != value]
    more = resolved.settings.eval_tasks > run.settings.eval_tasks
    differing += [f"eval_tasks = {run.settings.eval_tasks}"] if more else []
    if ours.isdisjoint(theirs) or not differing:
        return ()
    trained = any(each.startswith(("seed ", "eval_tasks ", "env")) for each in differing)
    note = (
        f"the run of this model used {', '.join(differing)}, which this {'evaluation' if evaluates else 'run'} does not"
    )
    note += ", so it may have trained on these held-out tasks" if trained else ""
    folder = shlex.quote(os.path.relpath(Path(run.source.path).parent))
    return (note + (f"; to evaluate as the run did, type: rollouts eval {folder}" if plays else ""),)


def _compared(resolved: Resolved, *, plays: bool) -> dict[str, Any]:
    """By its name, every setting that decides which tasks are held out, and if it `plays`, how they are played."""
    keys = ("env", "tool", "reward") if plays else ("env",)
    tables = component_tables({key: resolved.components[key] for key in keys})
    names = ("seed", "system", "template", "tool_parser", "max_tokens", "max_turns") if plays else ("seed",)
    return dict(flattened(tables)) | {name: getattr(resolved.settings, name) for name in names}


def flattened(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a tree of settings, by its dotted name."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


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
            raise ConfigError(
                f"the run in {source} is still running ({writer}), and has no checkpoint yet; wait for it"
            )
        raise ConfigError(f"the run in {source} has no checkpoint yet; to continue it, type: rollouts resume {source}")
    runs = runs_inside(path)
    give = "give a folder that a run wrote, such as runs/first or runs/first/checkpoints/step_000120"
    advice = f"\ndid you mean: {', '.join(runs[:3])}?" if runs else f"; {give}"
    raise ConfigError(f"the folder {source} holds no run, no checkpoint, no model and no adapter{advice}")


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
