"""`rollouts sft [FILE]`: as `run`, by demonstrations."""

from __future__ import annotations

from typing import Any

import click

from rollouts.cli.options import DOTTED_FLAGS, SettingsCommand, read_settings, setting_options
from rollouts.cli.run import dry_run_option

__all__ = ["sft"]


def _sft(file: str | None, dry_run: bool, **options: Any) -> int:
    resolved, _ = read_settings(click.get_current_context(), file, options, forced={"mode": "sft"})
    from rollouts.compose import run_command

    return run_command(resolved, dry_run)


sft = SettingsCommand(
    "sft",
    callback=_sft,
    params=[*setting_options(leave_out=("mode",)), dry_run_option()],
    help="Train a model on demonstrations: those of an environment, or the rows of a file.\n\n"
    "The same as `rollouts run --mode sft`. FILE holds settings (.toml, .json or .py).\n\n"
    "\b\nExample:\n  rollouts sft --env calculator --steps 200",
    epilog=DOTTED_FLAGS,
)
