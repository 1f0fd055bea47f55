"""docs/cli.md is the commands' own help."""

from __future__ import annotations

from pathlib import Path

import click

from rollouts.cli.app import COMMANDS, app
from rollouts.cli.reference import cli_reference

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_what_the_commands_say():
    assert PAGE.read_text() == cli_reference(), "run: python -m rollouts.cli.reference > docs/cli.md"


def test_the_page_has_every_command():
    text = cli_reference()
    for name in (*COMMANDS, "plugins list", "plugins show", "plugins doctor"):
        assert f" rollouts {name}\n" in text


def test_the_short_help_of_a_command_is_its_own():
    context = click.Context(app)
    for name, (_, line) in COMMANDS.items():
        command = app.get_command(context, name)
        assert command is not None
        assert (command.help or "").startswith(line.rstrip(".").split(":")[0])
