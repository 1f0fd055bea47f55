"""`rollouts config [FILE]`: print a whole settings file, with comments."""

from __future__ import annotations

from typing import Any

import click

from rollouts.cli.options import DOTTED_FLAGS, SettingsCommand, read_settings, setting_options

__all__ = ["config"]


def _config(file: str | None, **options: Any) -> int:
    from rollouts.cli.components import explain_components
    from rollouts.config.render import to_toml
    from rollouts.config.secrets import resolved_without_secrets

    resolved, given = read_settings(click.get_current_context(), file, options)
    resolved, signatures = explain_components(resolved, given)
    click.echo(to_toml(resolved_without_secrets(resolved), commented=True, signatures=signatures), nl=False)
    return 0


config = SettingsCommand(
    "config",
    callback=_config,
    params=setting_options(),
    help="Print a whole settings file, with comments: each setting, what it is, its default.\n\n"
    "Components that are named here, or in FILE, have their own settings printed too.\n\n"
    "\b\nExample:\n  rollouts config --env calculator --loss grpo > my.toml",
    epilog=DOTTED_FLAGS,
)
