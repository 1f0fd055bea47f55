"""Text for terminals: without characters that a terminal obeys, numbers as a curve of bars, and tables."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import sys
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"

# A terminal obeys control characters, and a mark of the direction of text can reorder a whole line. A model may write
# both. The separators end a line.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""The text with the escapes of control characters, of marks of direction and of lone surrogates in their place.
    Tabs and line feeds stay.

    >>> visible("red: \x1b[31m, reversed: \u202e")
    'red: \\x1b[31m, reversed: \\u202e'
    """
    return _OBEYED.sub(lambda found: f"\\{'x%02x' if found[0] < 'Ā' else 'u%04x'}" % ord(found[0]), text)


def curve(values: Sequence[float], width: int) -> str:
    """The values as bars, from the lowest value to the highest. A value that is not finite is a gap. If there are more
    than `width` values, neighbors are averaged.

    >>> curve([0, 1, 2, 3], 16), curve([0, 2, 4, 6], 2), curve([5, math.nan, 5], 16), curve([], 16)
    ('▁▃▆█', '▁█', '▁ ▁', '')
    """
    means = binned(values, width)
    finite = [mean for mean in means if math.isfinite(mean)]
    low = min(finite, default=0.0)
    span = max(finite, default=0.0) - low or 1.0
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] if math.isfinite(mean) else " " for mean in means)


def binned(values: Sequence[float], width: int) -> list[float]:
    """At most `width` means of neighbors. The mean of values that are not finite is NaN.

    >>> binned([1.0, 3.0, math.inf, 5.0], 2)
    [2.0, 5.0]
    """
    count = min(width, len(values))
    bounds = [place * len(values) // max(count, 1) for place in range(count + 1)]
    parts = [[value for value in values[a:b] if math.isfinite(value)] for a, b in itertools.pairwise(bounds)]
    return [math.fsum(part) / len(part) if part else math.nan for part in parts]


_NUMBERS = ("steps", "reward", "size", "number")  # the columns that are aligned to the right
_LAST_COLUMN_MIN = 20  # characters; in a narrower terminal, lines wrap
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
    with console.capture() as caught:
        console.print(table)
    print("\n".join(line.rstrip() for line in caught.get().splitlines()))


def aligned(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """The rows as lines, with their columns below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"{indent}{'  '.join(map(str.ljust, row, widths))}".rstrip() for row in rows]


def aligned_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of rows with a header. In a terminal the last column is cut to the width."""
    if sys.stdout is not None and sys.stdout.isatty():
        others = sum(max(map(len, column)) + 2 for column in zip(*(row[:-1] for row in [head, *rows]), strict=True))
        room = max(shutil.get_terminal_size().columns - others, _LAST_COLUMN_MIN)
        rows = [(*row[:-1], row[-1] if len(row[-1]) <= room else f"{row[-1][: room - 1]}…") for row in rows]
    return "\n".join(aligned([head, ["-" * len(word) for word in head], *rows]))
