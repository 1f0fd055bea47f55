"""`rollouts check NAME|PATH`: does a component keep the contract of its kind? `rollouts new KIND NAME`: a package,
ready to publish.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollouts.cli.app import NamedCommand
from rollouts_check.scaffold.packages import KIND_NAMES, kind_of, namesakes, render_package, write_package

if TYPE_CHECKING:
    from rollouts_check.report import Report, Result


@click.command(
    "check",
    cls=NamedCommand,
    epilog="The exit code is 0 if no check failed, 1 if a check failed, and 2 for an unknown name or a wrong setting.",
)
@click.argument("name", metavar="NAME|PATH")
@click.option("--kind", metavar="KIND", help="The kind, if components of several kinds have this name.")
@click.option("--only", multiple=True, metavar="CHECK", help="Run only this check. Repeat it for several.")
@click.option("--skip", multiple=True, metavar="CHECK", help="Leave this check out. Repeat it for several.")
@click.option("--seed", type=int, default=0, show_default=True, help="The seed of all random numbers.")
@click.option(
    "--tasks", type=click.IntRange(1), default=5, show_default=True, help="How many tasks of an environment are played."
)
@click.option("--reward", multiple=True, metavar="NAME", help="The reward of an environment that has none of its own.")
@click.option("--env", metavar="NAME", help="The environment whose tasks a reward judges.")
@click.option(
    "--worker", default="", metavar="KIND", help="Check an environment in a worker: process, venv, or ws://HOST:PORT."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--badge", is_flag=True, help="Print a line of Markdown for a README.")
def check(name: str, kind: str | None, seed: int, tasks: int, as_json: bool, badge: bool, **given: Any) -> int:
    """Check whether a component keeps the contract of its kind: an environment, a reward, a loss, ...

    NAME is an installed component. PATH is the folder of a package, all of whose components are checked, or
    ./file.py:Name. Each check is one line; a failed one says what was tried, what was seen, and what to change.
    Settings are dotted flags: --env.digits 3, --loss.clip-high 0.3.

    --worker compares the environment in another process with the one in this process.

    \b
    Examples:
      rollouts check calculator --env.digits 3
      rollouts check group_mean --kind advantage
      rollouts check ./my_loss.py:my_loss --only gradient
      rollouts check . --badge
    """
    from rollouts.config.merging import merge
    from rollouts_check import api
    from rollouts_check.components.common import WORDS

    own: dict[str, Any] = {"reward": list(given["reward"])} if given["reward"] else {}
    own |= {"env": given["env"]} if given["env"] else {}
    own |= {"worker": {"kind": given["worker"]}} if given["worker"] else {}
    settings = merge(own, click.get_current_context().obj or {})
    options = api.Options(_names(given["only"]), _names(given["skip"]), seed, tasks, settings)
    is_shown = not as_json and not badge
    reports: list[Report] = []
    # What a component prints must not get into the JSON.
    with contextlib.nullcontext() if is_shown else contextlib.redirect_stdout(sys.stderr):
        for found in api.find(name, options, kind):
            if not api.checks_for(found, options):
                continue
            if is_shown:
                click.echo(f"{WORDS.get(found.kind, found.kind)} {found.label}")
            reports.append(api.check(found, options, _show if is_shown else lambda result: None))
            if is_shown:
                click.echo(reports[-1].verdict())
    if as_json:
        click.echo(json.dumps([report.as_json() for report in reports], indent=2))
    for report in reports if badge else ():
        click.echo(report.badge())
    return 0 if all(report.has_passed for report in reports) else 1


def _names(given: tuple[str, ...]) -> list[str]:
    """The names of checks; several may be separated by commas."""
    return [name.strip() for text in given for name in text.split(",") if name.strip()]


def _show(result: Result) -> None:
    first, *rest = result.lines()
    colors: dict[str, Any] = {"failed": {"fg": "red", "bold": True}, "skipped": {"dim": True}}
    click.secho(first, **colors.get(result.status, {}))
    for line in rest:
        click.echo(line)


@click.command(
    "new",
    cls=NamedCommand,
    help="Make a package, ready to publish, with one component.\n\n"
    "The package is the folder NAME, with the distribution rollouts-NAME: a component that works, its tests, a "
    "README, a license and a workflow for GitHub. NEXT.md has the lines to change.\n\n"
    f"KIND is {', '.join(KIND_NAMES)}.\n\n"
    "\b\nExamples:\n  rollouts new environment shop\n  rollouts new reward brevity --dest packages",
)
@click.argument("kind")
@click.argument("name")
@click.option("--dest", default=".", metavar="FOLDER", help="Make the package in this folder.  [default: .]")
@click.option("--author", metavar="TEXT", help="The holder of the license.  [default: git's user.name, if it has one]")
def new(kind: str, name: str, dest: str, author: str | None) -> int:
    """Make a package, ready to publish, with one component."""
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
