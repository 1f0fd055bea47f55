"""`rollouts new KIND NAME`: the folder of a package, ready to publish."""

from __future__ import annotations

import subprocess
from pathlib import Path

import click

from rollouts.cli.app import NamedCommand
from rollouts_check.scaffold.packages import KIND_NAMES


def _new(kind: str, name: str, dest: str, author: str | None) -> int:
    from rollouts_check.scaffold.packages import kind_of, namesakes, render_package, write_package

    chosen = kind_of(kind)
    package = render_package(chosen, name, _git_author() if author is None else author)
    folder = Path(dest) / name
    write_package(package, folder)
    for note in namesakes(chosen, name):
        click.echo(f"note: {note}", err=True)
    click.echo(f"{folder}: the package {package.distribution}")
    for path in package.files:
        click.echo(f"  {path}")
    click.echo("\ntype next:")
    for command in (f"pip install -e '{folder}[test]'", f"pytest {folder}", package.command):
        click.echo(f"  {command}")
    return 0


def _git_author() -> str:
    """The name that git knows; empty without git or a name."""
    try:
        done = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


new = NamedCommand(
    "new",
    callback=_new,
    params=[
        click.Argument(["kind"]),
        click.Argument(["name"]),
        click.Option(["--dest"], default=".", metavar="FOLDER", help="Make the package in this folder.  [default: .]"),
        click.Option(
            ["--author"], metavar="TEXT", help="The holder of the license.  [default: git's user.name, if it has one]"
        ),
    ],
    help="Make a package, ready to publish, with one component.\n\n"
    "The package is the folder NAME, with the distribution rollouts-NAME: a component that works, its tests, a "
    "README, a license and a workflow for GitHub. NEXT.md has the lines to change.\n\n"
    f"KIND is {', '.join(KIND_NAMES)}.\n\n"
    "\b\nExamples:\n  rollouts new environment shop\n  rollouts new reward brevity --dest packages",
)
"""Make a package, ready to publish, with one component."""
