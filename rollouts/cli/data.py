"""`rollouts data inspect`: look at conversations, with every token in the color of its mask."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from rollouts.cli.app import NamedGroup
from rollouts.cli.options import SettingsCommand, chosen_infos, given_settings
from rollouts.errors import ConfigError, counted
from rollouts.terminal_text import visible

if TYPE_CHECKING:
    from rich.console import Console

    from rollouts.runs.inspecting import Inspection

SETTINGS = ("model", "trust_remote_code", "system", "template", "tool_parser")
TRAINED, LESS_TRAINED, SHOWN = ("green", "bold green"), ("yellow", "bold yellow"), ("dim", "")
BAR = 40


@click.group("data", cls=NamedGroup, no_args_is_help=True)
def data() -> None:
    """Look at training data."""


def _inspect(source: str, show: int, first: int, **options: Any) -> int:
    """Show conversations as tokens, which of them are trained, and how long they are.

    FILE is what --data takes: a file, a folder or a name on the hub. The settings of --data apply, such as --data.turns
    last. RUN is the folder of a run: its saved trajectories, or the data of a run of mode sft.

    In a terminal, trained tokens are green, those with a weight other than 1 are yellow, and the others are dim.
    Neighboring tokens differ in brightness. Elsewhere, trained text is in [[ ]].

    \b
    Examples:
      rollouts data inspect chat.jsonl
      rollouts data inspect chat.jsonl --model my-model --data.max-length 2048
      rollouts data inspect runs/first --show 1
    """
    from rich.console import Console

    from rollouts.runs.inspecting import inspect_data

    for flag, value, least in (("--show", show, 0), ("--first", first, 1)):
        if value < least:
            raise ConfigError(f"{flag} {value}: expected {least} or more")
    given = given_settings(options)
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, emoji=False, markup=False)
    _print(console, inspect_data(source, given, show=show, first=first))
    return 0


data.add_command(
    SettingsCommand(
        "inspect",
        callback=_inspect,
        argument=click.Argument(["source"], metavar="FILE|RUN"),
        infos=chosen_infos(SETTINGS),
        own=[
            click.Option(
                ["--show"], type=int, default=3, metavar="N", help="Print so many conversations.  [default: 3]"
            ),
            click.Option(
                ["--first"], type=int, default=1000, metavar="N", help="Read so many conversations.  [default: 1000]"
            ),
        ],
    )
)


def _print(console: Console, found: Inspection) -> None:
    from rich.text import Text

    for note in found.notes:
        console.print(visible(note))
    for each in found.shown:
        trained = sum(weight > 0 for weight in each.weights)
        console.print(f"\n{visible(each.title)}: {counted(len(each.tokens), 'token')}, {trained} trained", style="bold")
        text = Text()
        if console.is_terminal:
            for number, (piece, weight) in enumerate(zip(each.texts, each.weights, strict=True)):
                styles = SHOWN if not weight else TRAINED if weight == 1 else LESS_TRAINED
                text.append(visible(piece), styles[number % 2])
        else:
            pairs = zip(each.texts, each.weights, strict=True)
            for is_trained, group in itertools.groupby(pairs, key=lambda pair: pair[1] > 0):
                words = visible("".join(piece for piece, _ in group))
                text.append(f"[[{words}]]" if is_trained else words)
        console.print(text)
    for place, why, sample in found.bad:
        console.print(f"\n{visible(place)}: {visible(why)}", style="red")
        if sample:
            console.print(f"the row: {visible(sample)}")
    console.print()
    for line in histogram(found.lengths):
        console.print(line)
    tokens = sum(found.lengths)
    console.print(
        f"median {statistics.median(found.lengths):g}, longest {max(found.lengths)}; "
        f"{sum(found.trained)} of {counted(tokens, 'token')} are trained ({sum(found.trained) / tokens:.0%})"
    )


def histogram(lengths: Sequence[int]) -> list[str]:
    """How many of these positive lengths are in each of up to ten equal ranges, as lines with bars.

    >>> print(*histogram([1, 2, 2, 30]), sep="\\n")
    tokens  sequences
     1-3            3  ████████████████████████████████████████
     4-6            0
     7-9            0
    10-12           0
    13-15           0
    16-18           0
    19-21           0
    22-24           0
    25-27           0
    28-30           1  █████████████
    """
    from rollouts.runs.inspecting import bins_of

    bins = bins_of(lengths)
    digits, counts = len(str(bins[-1][1])), [count for _, _, count in bins]
    ranges = [f"{least:>{digits}}" + (f"-{most}" if most > least else "") for least, most, _ in bins]
    left = max(len("tokens"), *map(len, ranges))
    rows = [f"{'tokens':<{left}}  sequences"]
    for words, count in zip(ranges, counts, strict=True):
        bar = "█" * max(count > 0, round(BAR * count / max(counts)))
        rows.append(f"{words:<{left}}  {count:>9}  {bar}".rstrip())
    return rows
