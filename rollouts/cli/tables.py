"""Tables of runs in a terminal, and a comparison of two runs in one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollouts.errors import counted
from rollouts.terminal_text import visible

if TYPE_CHECKING:
    from rollouts.runs.comparing import Paired

_NUMBERS = ("steps", "reward", "size", "number")  # the columns that are aligned to the right
_PIPE_WIDTH = 10_000  # nothing is cut that goes to a file or another program


def number(value: float | None) -> str:
    """A number with three decimals, or in the scientific notation if it is small.

    >>> number(0.5), number(3e-4), number(0), number(None)
    ('0.500', '3.0e-04', '0.000', '–')
    """
    if value is None:
        return "–"
    return f"{value:.1e}" if 0 < abs(value) < 0.001 else f"{value:.3f}"


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str] = ()) -> None:
    """Print a table. Columns without a value are left out; in a terminal that is too narrow, also those of `spare`, one
    after the other, until the table fits.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    console = Console(file=sys.stdout, highlight=False, width=None if is_terminal else _PIPE_WIDTH)
    columns = [[name, *(visible(row[index]) for row in rows)] for index, name in enumerate(head)]
    columns = [column for column in columns if any(column[1:])]
    for name in spare:
        if sum(max(map(cell_len, column)) + 2 for column in columns) > console.width:
            columns = [column for column in columns if column[0] != name]
    table = Table(title=title or None, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name, *_ in columns:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*map(Text, row))
    console.print(table)


def paired_words(name: str, first: str, found: Paired) -> str:
    """A paired comparison in one line."""
    from rollouts.runs.comparing import TASKS_MIN

    left_out = f"; {counted(found.left_out, 'task')} of one alone" if found.left_out else ""
    if found.tasks < TASKS_MIN:
        return (
            f"{name} against {first}: no verdict, because both have only {counted(found.tasks, 'task')}, and it takes "
            f"{TASKS_MIN}; the mean difference is {found.difference:+.3f}{left_out}"
        )
    return (
        f"{name} against {first}: {found.verdict}, {found.difference:+.3f} with the 95 % interval "
        f"{found.low:+.3f} to {found.high:+.3f}, over {counted(found.tasks, 'task')} of both{left_out}"
    )
