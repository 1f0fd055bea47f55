"""What came of a tool, as the model reads it: text of what it returned or raised, not too much of it; why it failed.

What is left out: calling the tool (`rollouts.agent.tools`, `worker`).
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from rollouts.author_code import printable
from rollouts.encoding import encode
from rollouts.errors import named

_CORE = str(Path(__file__).parents[1])

Failure = Literal["malformed", "unknown_tool", "bad_arguments", "timeout", "exception", "crashed"]


class ToolOutcome(NamedTuple):
    """The text for the model, why the call failed (None: it did not), and where an author's code raised."""

    text: str
    failure: Failure | None = None
    place: str = ""


def result_text(returned: Any) -> str:
    """Text as it is, None as nothing, anything else as JSON; what JSON cannot hold is replaced by words that say so.
    Raises whatever the `str` of an object raises.

    >>> result_text({"a": 1}), result_text(None)
    ('{"a":1}', '')
    """
    if isinstance(returned, str):
        return printable(returned)
    if returned is None:
        return ""
    try:
        return msgspec.json.encode(returned).decode()
    except TypeError:
        return printable(str(returned))  # no JSON for it, such as an array's number; what it prints is all there is
    except (ValueError, RecursionError):
        return encode(returned).decode()


def raised(error: BaseException, characters_max: int) -> ToolOutcome:
    """The outcome of a tool that raised this."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_CORE)]
    place = ""
    if frames:
        path = Path(frames[-1].filename)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        place = printable(f"{shown}, line {frames[-1].lineno}: {frames[-1].line}")
    return ToolOutcome(shortened(f"Error: {named(error)}", characters_max), "exception", place)


def shortened(text: str, characters_max: int) -> str:
    """The text, cut with a note where it is longer."""
    if len(text) <= characters_max:
        return text
    return f"{text[:characters_max]}\n[cut: the first {characters_max} of {len(text)} characters]"
