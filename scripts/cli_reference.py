"""Print the help of all commands as a markdown page. `docs/cli.md` is this page; a test compares them.

python scripts/cli_reference.py > docs/cli.md
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from rollouts.cli.app import app

_WIDTH = 118


def cli_reference() -> str:
    """The page. It does not depend on the terminal."""
    parts = [
        "# The command line",
        "Made from the commands' help: `python scripts/cli_reference.py > docs/cli.md`. A test checks it.",
    ]
    for path, context in _contexts("rollouts", app, None):
        parts += [f"{'#' * min(len(path.split()) + 1, 4)} {path}", f"```text\n{context.get_help().rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _contexts(name: str, command: click.Command, parent: click.Context | None) -> Iterator[tuple[str, click.Context]]:
    """A command and its subcommands, each with a context of a fixed width."""
    names = app.context_settings["help_option_names"]
    widths = {"terminal_width": _WIDTH, "max_content_width": _WIDTH}
    context = click.Context(command, parent, info_name=name, help_option_names=names, **widths)
    yield context.command_path, context
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            below = command.get_command(context, child)
            assert below is not None, f"{context.command_path} lists {child} and does not have it"
            yield from _contexts(child, below, context)


if __name__ == "__main__":
    click.echo(cli_reference(), nl=False)
