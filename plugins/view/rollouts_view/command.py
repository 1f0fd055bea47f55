"""`rollouts view`: runs in a browser, from a curve down to one token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollouts.cli.app import NamedCommand

if TYPE_CHECKING:
    from rollouts.config.flags import Tree


@click.command("view", cls=NamedCommand)
@click.argument("places", nargs=-1, metavar="[RUN|DIR|FILE]...")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="The port to listen on.  [default: any free port]"
)
@click.option("--model", metavar="TEXT", help="The model whose tokens of FILE are shown.  [default: tiny]")
@click.option("--new", "is_new", is_flag=True, help="Open the form that writes the settings file of a new run.")
@click.option("--open", "opens", is_flag=True, help="Open the link in a browser.")
@click.option(
    "--export", "target", metavar="FILE", help="Write one HTML file with one run instead, to send to somebody."
)
def view(places: Sequence[str], port: int, model: str | None, is_new: bool, opens: bool, target: str | None) -> int:
    """Look at runs in a browser, from a curve down to one token.

    Each argument is a run or a directory of runs; without one it is the directory `runs`. The page is served on this
    machine alone, and a browser needs the link with its token. Runs that still train are shown as they are.
    Ctrl-C ends the server.

    FILE has conversations to train on. It is shown as tokens with their masks, and the settings of --data apply.

    With --new, the directory may have no runs yet; without one it is the current directory, and settings files are
    written there and below.

    \b
    Examples:
      rollouts view
      rollouts view runs/first runs/second --port 8080
      rollouts view runs/first --export first.html
      rollouts view chat.jsonl --model my-model --data.max-length 2048
      rollouts view --new
    """
    from rollouts_view.server import open_catalog, page_of_data
    from rollouts_view.server import view as serve

    files = [place for place in places if Path(place).is_file()]
    data = _data(files, model, click.get_current_context().obj or {})
    folders = [Path(place) for place in places if place not in files]
    if not places:
        folders = [Path("." if is_new else "runs")]
    catalog = open_catalog(folders, may_be_empty=is_new or bool(data), data=data)
    if target is not None:
        from rollouts_view.export import export

        click.echo(export(catalog, Path(target)))
        return 0
    import webbrowser

    serve(
        catalog,
        port,
        click.echo,
        webbrowser.open if opens else None,
        page="#/new" if is_new else page_of_data(files[0]) if files else "",
    )
    return 0


def _data(files: Sequence[str], model: str | None, dotted: Tree) -> dict[str, Tree]:
    """The settings of each file of data. Raises UserError for settings without a file, or that no file has."""
    from rollouts.config.flags import flag_name, read_flag
    from rollouts.config.merging import merge
    from rollouts.data.source import choose_loader
    from rollouts.errors import UserError
    from rollouts.plugins.manager import PluginManager

    wrong = [key for key in dotted if key != "data"] or (list(dotted) if not files else [])
    if wrong or (model is not None and not files):
        flag = flag_name((wrong[0],)) if wrong else "--model"
        raise UserError(
            f"{flag}: `rollouts view` takes --model and the settings of --data, for a file of conversations\n"
            "type: rollouts view chat.jsonl --model my-model --data.turns last"
        )
    given = dotted | ({"model": read_flag(model)} if model is not None else {})
    data = {file: merge({"data": file}, given) for file in files}
    for tree in data.values():
        choose_loader(PluginManager(), tree["data"])  # raises for a file that no loader reads
    return data
