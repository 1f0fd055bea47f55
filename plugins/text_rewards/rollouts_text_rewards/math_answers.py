"""`math_equal`: equality as mathematics, with math-verify.

math-verify parses with sympy, which a hostile answer can keep busy for ever. So it runs in another process with a
deadline and a limit of memory, and without its own alarm signals, which work in a main thread only.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

from msgspec import Meta

from rollouts import Score, Task, Trajectory
from rollouts_text_rewards.answers import NO_ANSWER, accepted
from rollouts_text_rewards.processes import limited_memory, stopped_at

BOXED = "\\boxed"


def equality(wanted: list[str], reply: str) -> dict[str, bool | None]:
    """Whether the answer in a reply equals one of the accepted ones. None if math-verify can read none of these."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no timeout of its own
    with limited_memory():
        readable = [gold for gold in (_gold(each) for each in wanted) if gold]
        if not readable:
            return {"found": None}
        answer = parse(reply, parsing_timeout=None)
        return {"found": any(verify(gold, answer, timeout_seconds=None) for gold in readable)}


def _gold(text: str) -> list[Any]:
    """An answer of a task as math-verify reads it; empty if it cannot."""
    from math_verify import parse

    found: list[Any] = parse(f"${text}$", parsing_timeout=None) if "$" not in text else []
    return found or parse(text, parsing_timeout=None)


async def math_equal(
    task: Task,
    trajectory: Trajectory,
    *,
    boxed: bool = False,
    characters_max: Annotated[int, Meta(ge=1)] = 4000,
    seconds: Annotated[float, Meta(gt=0)] = 5.0,
) -> float | Score:
    """1 if the answer in the reply equals that of the task as mathematics, also in another form; else 0.

    The answer is what math-verify finds in the reply: the last boxed expression, else the last one. None if the task
    has no answer that it can read, or if it takes too long.

    Args:
        boxed: the answer must be in \\\\boxed{}
        characters_max: only the end of a longer reply is read
        seconds: the time for one reply
    """
    wanted = accepted(task)
    if not wanted:
        return NO_ANSWER
    reply = trajectory.last_text[-characters_max:]
    if boxed and BOXED not in reply:
        return 0.0
    reply = reply[reply.rindex(BOXED) :] if boxed else reply
    outcome = await stopped_at(seconds, equality, wanted=wanted, reply=reply)
    if outcome.why:
        return Score(None, {"math_failures": 1.0}, outcome.why)
    if outcome.value is None:
        why = f"math-verify cannot read the answer of the task: {wanted[0][:80]!r}"
        return Score(None, {"math_failures": 1.0}, why)
    return Score(float(outcome.value), {"math_failures": 0.0})
