"""Observations as text: the colors of the render mode `ansi`, and the grid of minigrid."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")

HEADINGS = ("east", "south", "west", "north")
SYMBOLS = {"unseen": "?", "empty": ".", "floor": ".", "wall": "#", "door": "D", "key": "K", "ball": "A", "box": "B",
           "goal": "G", "lava": "V", "agent": "@"}  # fmt: skip


def colors_as_tags(text: str) -> str:
    r"""The text with its terminal colors as tags, without empty lines around it.

    >>> colors_as_tags("\n\x1b[41mS\x1b[0mFFF\nFHFH\n")
    '<red>S</red>FFF\nFHFH'
    """
    opened: list[str] = []

    def tag(match: re.Match[str]) -> str:
        codes = [int(code) for code in match[1].split(";") if code]
        colors = [COLORS[code % 10] for code in codes if 30 <= code % 60 < 50 and code % 10 < len(COLORS)]
        if colors:
            opened.append(colors[0])
            return f"<{colors[0]}>"
        return f"</{opened.pop()}>" if opened and (not codes or codes == [0]) else ""

    return _ESCAPE.sub(tag, text).strip("\n")


def grid_as_text(observation: Mapping[str, Any]) -> str:
    """An observation of minigrid: the mission, the heading, what the agent carries, the cells that it sees, and the
    objects in them. Two different observations have different texts.
    """
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX

    states = {index: state for state, index in STATE_TO_IDX.items()}
    image = observation["image"]
    width, height = image.shape[:2]
    middle, bottom = width // 2, height - 1  # where the agent is; it looks up

    def thing(x: int, y: int) -> tuple[str, str]:
        kind, color, state = (int(each) for each in image[x, y])
        name = IDX_TO_OBJECT[kind]
        door = f"{states[state]} " if name == "door" else f"state {state} " if state else ""
        return name, f"{door}{IDX_TO_COLOR[color]} {name}"

    seen = [(bottom - y, x - middle, *thing(x, y)) for y in reversed(range(height)) for x in range(width)]
    rows = ["".join(SYMBOLS[thing(x, y)[0]] for x in range(width)) for y in range(height)]
    rows[bottom] = f"{rows[bottom][:middle]}^{rows[bottom][middle + 1 :]}"
    (_, _, carried, words) = next(each for each in seen if each[:2] == (0, 0))
    objects = [f"{name} {_place(ahead, side)}" for ahead, side, kind, name in seen
               if _is_listed(kind, name) and (ahead, side) != (0, 0)]  # fmt: skip
    lines = (
        f"Mission: {observation['mission']}",
        f"You face {HEADINGS[int(observation['direction'])]} and carry {_carried(carried, words)}.",
        "You see this; you are ^ and look up:",
        *rows,
        *objects,
    )
    return "\n".join(lines)


def _is_listed(kind: str, name: str) -> bool:
    """Whether the grid's symbol does not say everything about a cell."""
    usual = {"unseen": "red unseen", "empty": "red empty", "wall": "grey wall"}  # codespell:ignore grey
    return usual.get(kind) != name


def _carried(kind: str, words: str) -> str:
    return "nothing" if kind in ("empty", "unseen") else f"a {words}"


def _place(ahead: int, side: int) -> str:
    """Where a cell is, seen from the agent."""
    parts = [f"{ahead} ahead"] if ahead else []
    parts += [f"{abs(side)} to the {'left' if side < 0 else 'right'}"] if side else []
    return ", ".join(parts)
