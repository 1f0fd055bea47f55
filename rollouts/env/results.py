"""What came of a tool, as the model reads it: text of what it returned, or of what it raised, and not too much of it.

What is left out: calling the tool (`rollouts.agent_tools`, `worker`).
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["error_words", "result_text", "shortened"]


def result_text(returned: Any) -> str:
    """Text as it is, None as nothing, anything else as JSON.

    >>> result_text({"a": 1}), result_text(None)
    ('{"a":1}', '')
    """
    if isinstance(returned, str):
        return returned
    if returned is None:
        return ""
    try:
        return msgspec.json.encode(returned).decode()
    except TypeError:
        return str(returned)  # no JSON for it, such as an array's number; what it prints is all there is


def error_words(error: BaseException) -> str:
    """Type and message, without a traceback; of a group, its first member."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def shortened(text: str, characters_max: int) -> str:
    """The text, cut with a note where it is longer."""
    if len(text) <= characters_max:
        return text
    return f"{text[:characters_max]}\n[cut: the first {characters_max} of {len(text)} characters]"
