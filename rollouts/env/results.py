"""What came of a tool, as the model reads it: text of what it returned or raised, not too much of it; why it failed.

What is left out: calling the tool (`rollouts.agent.tools`, `worker`).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from rollouts.author_code import printable
from rollouts.encoding import encode

Failure = Literal["malformed", "unknown_tool", "bad_arguments", "timeout", "exception", "crashed"]


class ToolOutcome(NamedTuple):
    """The text for the model, and why the call failed (None: it did not). `error` is what the tool raised, with the
    author's line, which the model has no use for.
    """

    text: str
    failure: Failure | None = None
    error: str = ""


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


def shortened(text: str, characters_max: int) -> str:
    """The text, cut with a note where it is longer."""
    if len(text) <= characters_max:
        return text
    return f"{text[:characters_max]}\n[cut: the first {characters_max} of {len(text)} characters]"
