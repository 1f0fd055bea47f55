"""`rollouts run [FILE]`: compose a run from flags and a file, and run it."""

from __future__ import annotations

from typing import Any

import click

from rollouts.cli.options import DOTTED_FLAGS, SettingsCommand, read_settings, setting_options

__all__ = ["dry_run_option", "run"]


def dry_run_option() -> click.Option:
    """`--dry-run`."""
    return click.Option(
        ["--dry-run"],
        is_flag=True,
        help="Compose everything, load no weights, print the settings and components, or the first error.",
    )


def _run(file: str | None, dry_run: bool, **options: Any) -> int:
    resolved, _ = read_settings(click.get_current_context(), file, options)
    from rollouts.compose import run_command

    return run_command(resolved, dry_run)


run = SettingsCommand(
    "run",
    callback=_run,
    params=[*setting_options(), dry_run_option()],
    help="Train a model by reinforcement in an environment.\n\n"
    "FILE holds settings (.toml, .json or .py); every one of them is also a flag.\n\n"
    "\b\nExamples:\n  rollouts run --env calculator --loss grpo\n"
    "  rollouts run configs/calculator_tiny.toml --steps 20 --env.digits 1",
    epilog=DOTTED_FLAGS,
)
