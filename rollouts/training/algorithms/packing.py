"""Which rows go into one packed sequence: a pure function on lengths. How they are run: backends/transformer.py."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["pack_rows"]


def pack_rows(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Bins of row numbers, each of at most `tokens_max` tokens; a row longer than that has a bin of its own.

    First-fit decreasing: the longest row first, each into the first bin that has room; at most 11/9 of the fewest
    possible bins, and one more (Johnson 1973). Equal lengths go in the order of their numbers, so the same lengths
    always give the same bins. The rows of a bin are in the order of their numbers.
    """
    assert tokens_max >= 1, f"bins of {tokens_max} tokens hold nothing"
    bins: list[list[int]] = []
    rooms: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        assert lengths[row] >= 0, f"row {row} has {lengths[row]} tokens"
        for place, room in enumerate(rooms):
            if lengths[row] <= room:
                bins[place].append(row)
                rooms[place] -= lengths[row]
                break
        else:
            bins.append([row])
            rooms.append(tokens_max - lengths[row])
    return [sorted(chosen) for chosen in bins]
