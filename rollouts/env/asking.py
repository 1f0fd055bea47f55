"""Ask a reward about a rollout: once, or once for each turn of the model.

A reward that names `turn` is called for each turn, and what it returns is the reward of that turn. A reward that is
marked `@reward(per="turn")` and does not name `turn` is called once, and returns a list with a number for each turn.
Not here: rewards of whole groups (`rollouts.training.rollout_gen.groups`), and mixing (`mixing.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollouts.author_code import shown
from rollouts.env import calls
from rollouts.env.authoring import REWARD_MARK, mark_of
from rollouts.env.mixing import RETURNED_NONE, Verdict, check_turns, read_verdict
from rollouts.errors import RewardError
from rollouts.plugins.signature import bind
from rollouts.types import Score, Trajectory

TURN = "turn"
"""The input that makes a reward one of each turn."""

NO_TURN = "the model had no turn"


async def ask(
    function: Callable[..., Any],
    requests: Sequence[str],
    available: Mapping[str, Any],
    *,
    name: str,
    weight: float = 1.0,
    settings: Mapping[str, Any] | None = None,
    seconds: float,
) -> Verdict:
    """The verdict of one reward. `requests` are its parameters, and `available` has their values, but `turn`.

    `seconds` is the deadline of all its calls together. Raises RewardError for an invalid value, CallTimeoutError, and
    what the reward raises.
    """
    bound, trajectory = bind(function, settings or {}), available["trajectory"]
    if TURN in requests:
        return await _ask_each(bound, requests, available, name, weight, seconds)
    read = functools.partial(_read_list if is_list_by_turn(function) else read_verdict, name, weight)
    arguments = (available[request] for request in requests)
    verdict: Verdict = await calls.call(bound, *arguments, timeout_seconds=seconds, convert=read)
    return check_turns(verdict, trajectory.turns)


def is_list_by_turn(function: Callable[..., Any]) -> bool:
    """Whether the function is marked `@reward(per="turn")`: if it does not name `turn`, it returns a list."""
    mark = mark_of(getattr(function, "__func__", function), REWARD_MARK)
    return mark is not None and mark[-1] == TURN


async def _ask_each(
    function: Callable[..., Any],
    requests: Sequence[str],
    available: Mapping[str, Any],
    name: str,
    weight: float,
    seconds: float,
) -> Verdict:
    """One call for each turn. If the reward could not judge one of them, it could not judge the rollout."""
    import trio

    trajectory: Trajectory = available["trajectory"]
    deadline = trio.current_time() + seconds
    found: list[Verdict] = []
    for turn in trajectory.turn_messages:
        arguments = ({**available, TURN: turn}[request] for request in requests)
        verdict: Verdict = await calls.call(
            function,
            *arguments,
            timeout_seconds=max(deadline - trio.current_time(), 0.0),
            convert=functools.partial(read_verdict, f"{name}, turn {turn.index + 1}", weight),
        )
        if verdict.turns:
            raise RewardError(
                f"reward {name!r} is asked about one turn, and returned a Score with turns; return the reward of "
                "`turn` alone"
            )
        found.append(verdict)
    return _joined(found, name, weight)


def _joined(found: Sequence[Verdict], name: str, weight: float) -> Verdict:
    """The verdict of a rollout from those of its turns. Values and parts are added up."""
    unjudged = [turn for turn, verdict in enumerate(found, start=1) if verdict.value is None]
    words = [f"turn {turn}: {verdict.why}" for turn, verdict in enumerate(found, start=1) if verdict.why]
    if unjudged:
        first = f"turn {unjudged[0]}: {found[unjudged[0] - 1].why or RETURNED_NONE}"
        return Verdict(name, weight, None, {}, first, name)
    if not found:
        return Verdict(name, weight, None, {}, NO_TURN, name)
    values = [verdict.value or 0.0 for verdict in found]
    parts: dict[str, float | None] = {}
    for verdict in found:
        for part, value in verdict.parts.items():
            parts[part] = (parts.get(part) or 0.0) + (value or 0.0)
    return Verdict(name, weight, sum(values), parts, "; ".join(words), name, values)


def _read_list(name: str, weight: float, returned: Any) -> Verdict:
    """The verdict of a reward that returns a list with one number for each turn."""
    if returned is None or isinstance(returned, Score):
        return read_verdict(name, weight, returned)
    listed = returned.tolist() if hasattr(type(returned), "tolist") else returned  # an array or a tensor
    if not isinstance(listed, list | tuple):
        raise RewardError(
            f"reward {name!r} is marked per='turn' and returned {shown(returned)}; name `turn` to be called once for "
            "each turn, or return a list with one number for each turn"
        )
    if not listed:
        return Verdict(name, weight, None, {}, NO_TURN, name)
    return read_verdict(name, weight, Score(None, turns=list(listed)))
