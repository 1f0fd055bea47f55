"""`rollouts check NAME|PATH`: does an environment keep its contract?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from rollouts.cli.app import NamedCommand

if TYPE_CHECKING:
    from rollouts.check.report import Report, Result


def _check(
    name: str,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    seed: int,
    tasks: int,
    reward: tuple[str, ...],
    worker: str,
    as_json: bool,
    badge: bool,
) -> int:
    from rollouts.check import api
    from rollouts.config.merging import merge

    dotted = click.get_current_context().obj or {}
    given: dict[str, Any] = {"reward": list(reward)} if reward else {}
    settings = merge(given | ({"worker": {"kind": worker}} if worker else {}), dotted)
    options = api.Options(_names(only), _names(skip), seed, tasks, settings)
    is_shown = not as_json and not badge
    reports: list[Report] = []
    for found in api.find(name, options):
        if is_shown:
            click.echo(f"environment {found.label}")
        reports.append(api.check(found, options, _show if is_shown else lambda result: None))
        if is_shown:
            click.echo(reports[-1].verdict())
    if as_json:
        click.echo(json.dumps([report.as_json() for report in reports], indent=2))
    if badge:
        for report in reports:
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


check = NamedCommand(
    "check",
    callback=_check,
    params=[
        click.Argument(["name"], metavar="NAME|PATH"),
        click.Option(["--only"], multiple=True, metavar="CHECK", help="Run only this check. Repeat it for several."),
        click.Option(["--skip"], multiple=True, metavar="CHECK", help="Leave this check out. Repeat it for several."),
        click.Option(["--seed"], type=int, default=0, show_default=True, help="The seed of all random numbers."),
        click.Option(
            ["--tasks"], type=click.IntRange(1), default=5, show_default=True, help="How many tasks are played."
        ),
        click.Option(
            ["--reward"], multiple=True, metavar="NAME", help="The reward of an environment that has none of its own."
        ),
        click.Option(
            ["--worker"], default="", metavar="KIND", help="Check it in a worker: process, venv, or ws://HOST:PORT."
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Print the results as JSON."),
        click.Option(["--badge"], is_flag=True, help="Print a line of Markdown for a README."),
    ],
    epilog="The exit code is 0 if no check failed, 1 if a check failed, and 2 for an unknown name or a wrong setting.",
    help="Check whether an environment keeps its contract.\n\n"
    "NAME is an installed environment. PATH is the folder of a package, or ./file.py:Class. Each check is one line; a "
    "failed one says what was tried, what was seen, and what to change. Settings are dotted flags: --env.digits 3.\n\n"
    "--worker compares the environment in another process with the one in this process.\n\n"
    "\b\nExamples:\n  rollouts check calculator --env.digits 3\n  rollouts check ./my_env.py:MyEnv --only oracle\n"
    "  rollouts check . --badge",
)
