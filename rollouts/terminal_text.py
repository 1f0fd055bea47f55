"""Text for terminals: without characters that a terminal obeys, and numbers as a curve of bars."""

from __future__ import annotations

import itertools
import math
import re
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
