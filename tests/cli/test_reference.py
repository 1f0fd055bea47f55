"""docs/cli.md is the commands' own help."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from rollouts.cli.app import COMMANDS, app

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cli.md"


def cli_reference():
    spec = importlib.util.spec_from_file_location("cli_reference", ROOT / "scripts" / "cli_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.cli_reference()


def test_the_page_is_what_the_commands_say():
    assert PAGE.read_text() == cli_reference(), "run: python scripts/cli_reference.py > docs/cli.md"


def test_the_page_has_every_command():
    text = cli_reference()
    for name in (*COMMANDS, "plugins list", "plugins show", "plugins doctor", "env install"):
        assert f" rollouts {name}\n" in text


def test_the_short_help_of_a_command_is_its_own():
    context = click.Context(app)
    for name, (_, line) in COMMANDS.items():
        command = app.get_command(context, name)
        assert command is not None
        assert (command.help or "").startswith(line.rstrip(".").split(":")[0])
