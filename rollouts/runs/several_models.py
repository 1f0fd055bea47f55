"""One evaluation of several models, one after another, on the same held-out tasks.

Each model has its own process and folder, PARENT/NAME, which is that of a single evaluation. So a model that fails does
not affect the others. PARENT/models.json has the command and the models. If PARENT is resumed, unfinished evaluations
continue. Not here: a single evaluation (`jobs.evaluate`), and how the results are shown (`rollouts.cli.models`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollouts.config.secrets import command_without_secrets
from rollouts.disk import read_regular, write_whole
from rollouts.encoding import encode_indented
from rollouts.errors import ConfigError, OutputError, RunError
from rollouts.runs.children import INTERRUPTED, MISTAKE, run_command, shown_flags
from rollouts.runs.folder import SUMMARY, check_out, holds_run, numbered, read_json
from rollouts.runs.jobs.evaluate import model_name

MODELS = "models.json"


class _Written(msgspec.Struct):
    command: list[str]
    models: dict[str, str]


class ModelRuns(NamedTuple):
    """The evaluations of one command: `command` is "eval" and its arguments, without models and folder. `models` are
    the names of their folders, each with its model. `display` is that of each evaluation.
    """

    parent: Path
    command: list[str]
    models: dict[str, str]
    display: str = "auto"

    def is_done(self, name: str) -> bool:
        """Whether every episode of this evaluation was played."""
        summary = read_json(self.parent / name / SUMMARY)
        return summary.get("status") == "done" and not summary.get("failed")

    def arguments(self, name: str) -> list[str]:
        """The command line that begins this evaluation, or resumes it."""
        folder = self.parent / name
        if holds_run(folder):
            return ["resume", str(folder), *shown_flags(self.display)]
        return [*self.command, f"--model={self.models[name]}", f"--out={folder}", *shown_flags(self.display)]


def named_models(models: Sequence[str]) -> dict[str, str]:
    """The models by the names of their folders. Raises ConfigError if a model is given twice.

    >>> named_models(["runs/first", "Qwen/Qwen3-0.6B", "other/first"])
    {'first': 'runs/first', 'Qwen3-0.6B': 'Qwen/Qwen3-0.6B', 'first-2': 'other/first'}
    """
    found: dict[str, str] = {}
    for model in models:
        if model in found.values():
            raise ConfigError(f"--model {model} is given twice; leave one out")
        wanted = re.sub(r"[^\w.-]+", "-", model_name(model)).strip("-.") or "model"
        found[next(name for name in numbered(wanted) if name not in found)] = model
    return found


def check_models(runs: ModelRuns) -> None:
    """Raise OutputError if the folder has anything else."""
    if (runs.parent / MODELS).exists():
        before = read_models(runs.parent)
        if (before.command, before.models) != (command_without_secrets(runs.command), runs.models):
            raise OutputError(
                f"{runs.parent} has another evaluation of models: rollouts {shlex.join(before.command)}\n"
                f"type --out with another name, or continue with: rollouts resume {shlex.quote(str(runs.parent))}"
            )
    else:
        check_out(str(runs.parent))


def read_models(parent: Path) -> ModelRuns:
    """The evaluations of an earlier call, from its folder. Raises ConfigError."""
    try:
        written = msgspec.json.decode(read_regular(parent / MODELS), type=_Written)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{parent / MODELS} cannot be read: {error}; resume the evaluations in {parent} one by one"
        ) from error
    return ModelRuns(parent, written.command, written.models)


def evaluate_models(runs: ModelRuns, say: Callable[[str], None]) -> None:
    """Evaluate each model in its own process, or resume it. `say` is called with a line before each.

    Ctrl-C ends the current evaluation as usual, and no more begin. After a model that failed or that was refused, the
    next one still begins; only if the very first is refused, nothing else is tried.

    Raises ConfigError, RunError after the last one if any have failed, and KeyboardInterrupt.
    """
    again = f"rollouts resume {shlex.quote(str(runs.parent))}"
    failed = list[str]()
    try:
        runs.parent.mkdir(parents=True, exist_ok=True)
        content = _Written(command_without_secrets(runs.command), runs.models)
        write_whole(runs.parent / MODELS, encode_indented(content).encode())
    except OSError as error:
        raise OutputError(f"{runs.parent} cannot be written: {error.strerror or error}; type another --out") from error
    for place, (name, model) in enumerate(runs.models.items()):
        is_done = runs.is_done(name)
        say(f"--- {model} ({place + 1} of {len(runs.models)}): {runs.parent / name}{' is finished' if is_done else ''}")
        code = 0 if is_done else run_command(runs.arguments(name))
        if code in INTERRUPTED:
            raise KeyboardInterrupt(f"interrupted in {model}; continue with: {again}")
        if code == MISTAKE and not place and not (runs.parent / name).exists():
            (runs.parent / MODELS).unlink()
            if not any(runs.parent.iterdir()):
                runs.parent.rmdir()
            raise ConfigError(f"{model} was refused, and its error is above; no model was evaluated")
        if code:
            failed.append(model)
    if failed:
        raise RunError(f"these models were not evaluated: {', '.join(failed)}; try them again with: {again}")
