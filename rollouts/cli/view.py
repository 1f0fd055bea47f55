"""`rollouts view`: runs in a browser, from a curve down to one token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from rollouts.cli.app import NamedCommand


@click.command("view", cls=NamedCommand)
@click.argument("places", nargs=-1, metavar="[RUN|DIR]...")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="The port to listen on.  [default: any free port]"
)
@click.option("--new", "is_new", is_flag=True, help="Open the form that writes the settings file of a new run.")
@click.option("--open", "opens", is_flag=True, help="Open the link in a browser.")
@click.option(
    "--export", "target", metavar="FILE", help="Write one HTML file with one run instead, to send to somebody."
)
def view(places: Sequence[str], port: int, is_new: bool, opens: bool, target: str | None) -> int:
    """Look at runs in a browser, from a curve down to one token.

    Each argument is a run or a directory of runs; without one it is the directory `runs`. The page is served on this
    machine alone, and a browser needs the link with its token. Runs that still train are shown as they are.
    Ctrl-C ends the server.

    With --new, the directory may have no runs yet; without one it is the current directory, and settings files are
    written there and below.

    \b
    Examples:
      rollouts view
      rollouts view runs/first runs/second --port 8080
      rollouts view runs/first --export first.html
      rollouts view --new
    """
    from rollouts.view.server import open_catalog
    from rollouts.view.server import view as serve

    catalog = open_catalog([Path(place) for place in places or ("." if is_new else "runs",)], may_be_empty=is_new)
    if target is not None:
        from rollouts.view.export import export

        click.echo(export(catalog, Path(target)))
        return 0
    import webbrowser

    serve(catalog, port, _say, webbrowser.open if opens else None, page="#/new" if is_new else "")
    return 0


def _say(line: str) -> None:
    click.echo(line)
    if sys.stdout is not None:
        sys.stdout.flush()
