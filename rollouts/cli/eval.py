"""`rollouts eval [FILE]`: play a model on held-out tasks, and train nothing."""

from __future__ import annotations

from typing import Any

import click

from rollouts.cli.options import DOTTED_FLAGS, SettingsCommand, read_settings, setting_options
from rollouts.cli.run import dry_run_option
from rollouts.config.settings import EVAL, EVAL_DEFAULTS, SettingInfo, setting_infos

__all__ = ["evaluate"]

_DOCS = {
    "samples_per_prompt": "How often each task is played: more than once gives pass@k.",
    "temperature": "The temperature of sampling; 0 is greedy.",
    "model": "The model: a path (also of a run, a checkpoint or an adapter), a name, or `tiny`.",
}
_SHOWN = {
    "out": "runs/<time>-<env>-eval",
    "max_failures": "only an evaluation in which all failed stops it",
    "seed": "that of the run that is evaluated, else 0",
    "eval_tasks": "those of the run that is evaluated, else 512",
}


def _infos() -> list[SettingInfo]:
    """The settings that matter here, in the words that fit here."""
    return [
        info._replace(
            doc=_DOCS.get(info.name, info.doc),
            default=EVAL_DEFAULTS.get(info.name, info.default),
            shown=_SHOWN.get(info.name, info.shown),
            group="Sampling" if info.name == "seed" else info.group,
        )
        for info in setting_infos()
        if info.name in EVAL and info.name != "mode"
    ]


def _evaluate(file: str | None, dry_run: bool, **options: Any) -> int:
    resolved, _ = read_settings(click.get_current_context(), file, options, forced={"mode": "eval"})
    from rollouts.compose import run_command

    return run_command(resolved, dry_run)


evaluate = SettingsCommand(
    "eval",
    callback=_evaluate,
    infos=_infos(),
    params=[*setting_options(infos=_infos()), dry_run_option()],
    help="Evaluate a model in an environment: held-out tasks are played, nothing is trained.\n\n"
    "FILE holds settings (.toml, .json or .py), also those of a training run: what is of training is left out. "
    "Without a trainer any model will do: one that is here (--inference hf), one behind a server of one's own, or one "
    "behind an API.\n\n"
    "\b\nExamples:\n  rollouts eval --env calculator --model runs/first\n"
    "  rollouts eval --env calculator --model runs/first/checkpoints/step_000050 --temperature 0\n"
    "  rollouts eval --env calculator --model gpt-4.1-mini --inference openai --samples-per-prompt 4",
    epilog=DOTTED_FLAGS,
)
