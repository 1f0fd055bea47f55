"""`rollouts run`, `sft`, `eval` and `resume`: compose a run from flags and a file, and run it."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollouts.cli.app import NamedCommand
from rollouts.cli.options import DISPLAY, SettingsCommand, given_flags, read_settings
from rollouts.config.settings import EVAL, EVAL_DEFAULTS, setting_infos
from rollouts.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from rollouts.runs.progress import Display

_DRY_RUN = click.Option(
    ["--dry-run"],
    is_flag=True,
    help="Check everything and print the settings and components, then `ok`; or the first error. Load no weights.",
)


_SEEDS = click.Option(
    ["--seeds"],
    metavar="LIST",
    help="Run once for each of these seeds, such as 0-4 or 0,3,7. Each run has its own folder in --out. The output "
    "ends with a table of all runs.",
)


_RUN = """Train a model by reinforcement in an environment.

FILE contains settings (.toml, .json or .py). Every setting is also a flag. `rollouts FILE` is the same as `rollouts run
FILE`.

\b
Examples:
  rollouts run --env calculator --loss grpo
  rollouts run configs/calculator_tiny.toml --steps 20 --env.digits 1
"""

_SFT = """Train a model on the demonstrations of an environment, or on conversations of a file.

The same as `rollouts run --mode sft`. FILE contains settings (.toml, .json or .py).

\b
Examples:
  rollouts sft --env calculator --steps 200
  rollouts sft --data chat.jsonl --steps 200
"""


def _start(
    command: str,
    forced: dict[str, Any],
    file: str | None,
    *,
    dry_run: bool,
    display: Display,
    seeds: str | None = None,
    **options: Any,
) -> int:
    if seeds is not None:
        from rollouts.cli.several import run_with_seeds

        run_with_seeds(command, file, options, seeds, display, dry_run=dry_run)
        return 0
    resolved, _ = read_settings(click.get_current_context(), file, options, forced=forced)
    if dry_run:
        from rollouts.runs.dry_run import dry_run as description

        print(description(resolved))
        return 0
    from rollouts.runs import run as run_resolved

    if display == "none":
        run_resolved(resolved, None)
        return 0
    from rollouts.runs.progress import shown_progress

    with shown_progress("stdout", display) as progress:
        run_resolved(resolved, progress)
    return 0


def _evaluate(file: str | None, dry_run: bool, display: Display, model: tuple[str, ...], **options: Any) -> int:
    """Evaluate a model on held-out tasks of an environment. Nothing is trained.

    FILE contains settings (.toml, .json or .py). It may be a training run's file (training settings are ignored), a
    run's folder (then its newest checkpoint is evaluated), or one checkpoint of a run. The model can be local
    (--inference hf), behind your own server, or behind an API.

    \b
    Examples:
      rollouts eval runs/first
      rollouts eval runs/first/checkpoints/step_000050 --temperature 0
      rollouts eval --env calculator --model tiny --model runs/first --model runs/second
      rollouts eval --env calculator --model gpt-4.1-mini --inference openai --samples-per-prompt 4
    """
    from rollouts.config.resolving import run_settings_file

    models = list(model)
    if file is not None and not Path(file).exists():
        _refuse_missing_model(file)
    if file is not None and Path(file).is_dir() and (config := run_settings_file(file)):
        models, file = models or [file], str(config)  # a run, or a checkpoint of one: its settings and this model
    if len(models) < 2:
        options["model"] = next(iter(models), None)
        return _start("eval", {"mode": "eval"}, file, dry_run=dry_run, display=display, **options)
    from rollouts.cli.several import run_with_models

    run_with_models(file, models, options, display, dry_run=dry_run)
    return 0


def _refuse_missing_model(given: str) -> None:
    """Raise ConfigError if a run's folder or a checkpoint was meant: the word is a path, and no settings file's."""
    from rollouts.config.files import SUFFIXES, runs_inside
    from rollouts.models.folders import nearest_checkpoints

    path = Path(given)
    if near := nearest_checkpoints(path):
        raise ConfigError(f"there is no checkpoint {given}; {near}")
    if "/" in given and path.suffix not in SUFFIXES and ".py:" not in given and "=" not in given:
        runs = {Path(run).name: run for run in runs_inside(path.parent)}
        near = suggestion(path.name, runs, runs.__getitem__) or f"to choose a model, `--model {shlex.quote(given)}`"
        raise ConfigError(f"there is no run folder, checkpoint or settings file {given}\n{near}")


def _resume(folder: str, checkpoint: str | None, display: Display, **options: Any) -> int:
    """Resume a run, or make it longer.

    The run continues from its last complete checkpoint, or from the beginning if there is none. An evaluation plays the
    episodes that are missing or that failed. DIR is the run's folder; its config.toml contains the settings. You can
    change settings of components: --training.processes 4.

    \b
    Examples:
      rollouts resume runs/mine
      rollouts resume runs/mine --steps 200
      rollouts resume runs/mine --checkpoint step_000008
    """
    from rollouts.runs import resume_run
    from rollouts.runs.progress import shown_progress
    from rollouts.runs.several import holds_runs

    if holds_runs(Path(folder)):
        from rollouts.cli.several import resume_several

        resume_several(Path(folder), options, checkpoint, display)
        return 0
    dotted = click.get_current_context().obj or {}
    with shown_progress("stdout", display) as progress:
        resume_run(folder, dotted | given_flags(options), progress, checkpoint=checkpoint or "")
    return 0


run = SettingsCommand("run", callback=partial(_start, "run", {}), help=_RUN, own=[_SEEDS, DISPLAY, _DRY_RUN])

sft = SettingsCommand(
    "sft",
    callback=partial(_start, "sft", {"mode": "sft"}),
    help=_SFT,
    infos=[info for info in setting_infos() if info.name not in ("mode", "from_run")],
    own=[_SEEDS, DISPLAY, _DRY_RUN],
)

_EVAL_DOCS = {
    "samples_per_prompt": "Episodes per task. More than one gives pass@k, and --reduce.",
    "temperature": "The sampling temperature. 0 is greedy.",
    "model": "The model: a path (also to a run, a checkpoint or an adapter), a name on the hub, or `tiny`. Repeat the "
    "flag to compare models.",
}
_EVAL_SHOWN = {
    "out": "runs/<time>-<env>-<model>-eval",
    "max_failures": "stop only if all failed",
    "seed": "that of the evaluated run, else 0",
    "eval_tasks": "that of the evaluated run, else 512",
}


evaluate = SettingsCommand(
    "eval",
    callback=_evaluate,
    infos=[
        info._replace(
            doc=_EVAL_DOCS.get(info.name, info.doc),
            default=EVAL_DEFAULTS.get(info.name, info.default),
            shown=_EVAL_SHOWN.get(info.name, info.shown),
            group="Sampling" if info.name == "seed" else info.group,
        )
        for info in setting_infos()
        if info.name in EVAL and info.name != "mode"
    ],
    own=[DISPLAY, _DRY_RUN],
    repeated=("model",),
)

resume = NamedCommand(
    "resume",
    callback=_resume,
    params=[
        click.Argument(["folder"], metavar="DIR"),
        click.Option(["--steps"], metavar="N", help="The total number of steps.  [default: as in DIR/config.toml]"),
        click.Option(
            ["--stop-when"],
            multiple=True,
            metavar="RULE",
            help="End the run early by these rules instead of its own; `none`: by no rule.  "
            "[default: as in DIR/config.toml]",
        ),
        click.Option(
            ["--max-hours"],
            metavar="X",
            help="When this command has run for this many hours, finish the step in progress and end the run; "
            "`none`: no limit.  [default: as in DIR/config.toml]",
        ),
        click.Option(
            ["--checkpoint"],
            metavar="NAME",
            help="Go back to this checkpoint: a name under DIR/checkpoints, or a path.  [default: the last one]",
        ),
        DISPLAY,
    ],
)
