"""What an environment's methods return, checked: the messages of `reply`, the number of a metric, a state.

Not here: the results of tools (`results`) and of rewards (`mixing`).
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec

from rollouts.author_code import authors_code, place_of_function, shown
from rollouts.env.authoring import JudgeMethod
from rollouts.errors import EnvironmentDefinitionError
from rollouts.types import Message


def reply_messages(env: Any, returned: Any) -> list[Message]:
    """The messages that the environment's `reply` returned, which may also be text. Raises TypeError, with the file and
    line of `reply`, if it returned anything else.
    """
    answers = returned if isinstance(returned, list | tuple) else [] if returned is None else [returned]
    for answer in answers:
        if not isinstance(answer, str | Message):
            place = place_of_function(env.reply)
            raise TypeError(
                f"it returned {type(answer).__name__}, expected text, a Message, a list of them, or None ({place})"
            )
    return [Message("user", answer) if isinstance(answer, str) else answer for answer in answers]


def finite_metric(metric: JudgeMethod, returned: Any) -> float:
    """The return value of a metric as a finite number. Raises TypeError with the file and line of the metric."""
    with contextlib.suppress(Exception), authors_code():  # the author's object may raise anything
        value = float(returned)
        if math.isfinite(value) and not isinstance(returned, str):
            return value
    place = place_of_function(metric.function)
    given = f"it returned {shown(returned)} ({type(returned).__name__}); a metric returns a finite number"
    raise TypeError(given + (f" ({place})" if place else ""))


def plain_state(name: str, state: Any) -> Any:
    """An environment's `state()` as JSON data. Raises EnvironmentDefinitionError if that is impossible."""
    try:
        return msgspec.json.decode(msgspec.json.encode(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentDefinitionError(
            f"{name}.state() returned a value that a checkpoint cannot store ({error}); return plain data: "
            "numbers, text, lists, dicts"
        ) from error
