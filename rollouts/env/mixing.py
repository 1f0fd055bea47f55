"""Rewards of several packages: asked about a rollout, once or once for each turn, and mixed by weight into one Score.

A reward that returns None or raises an exception *could not judge*. What follows depends on the policy `on_invalid`:
`drop` (the score's value is None: the rollout does not count in the baseline and is not trained), `zero` (the reward
counts as 0), or `raise` (RewardError). If a reward returns NaN, an infinity or a value that is not a number,
RewardError is raised under every policy; its message names the reward.

Each part is logged under its own name: a reward function under its alias, a `@reward` method of the environment under
the method's name, and the entries of `Score.parts` under their keys. If two names are equal, the later one gets its
alias as a prefix: `env.correct`, `brevity.words`. Not here: running rewards (`rollouts.agent.episode`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rollouts.author_code import authors_code, message_of, place_of_function, printable, shown
from rollouts.env import calls
from rollouts.env.authoring import REWARD_MARK, mark_of
from rollouts.errors import RewardError
from rollouts.plugins.signature import bind
from rollouts.types import Score

RETURNED_NONE = "it returned None"
FORGOTTEN = "a reward that returns None could not judge; did you forget `return`?"

InvalidPolicy = Literal["drop", "zero", "raise"]


class RewardTerm(NamedTuple):
    """One reward of a run. `function` None means the environment's own `@reward` methods, summed by their weights.

    `requests` are the function's parameters, in order. An `is_group` reward sees all rollouts of a prompt, and returns
    a list. One that names `groups` sees all groups that wait, and returns a list of lists.
    """

    alias: str
    function: Callable[..., Any] | None
    weight: float = 1.0
    settings: Mapping[str, Any] = {}
    requests: tuple[str, ...] = ()
    is_group: bool = False


class Verdict(NamedTuple):
    """The result of one reward for one rollout. `value` None: the reward could not judge; `why` is the reason, if it is
    known.
    """

    name: str
    weight: float
    value: float | None
    parts: Mapping[str, float | None] = {}
    why: str = ""
    alias: str = ""
    turns: Sequence[float] = ()


def env_term(weight: float = 1.0, alias: str = "env") -> RewardTerm:
    """The term of `--reward env:1`."""
    return RewardTerm(alias, None, weight)


def read_verdict(name: str, weight: float, returned: Any, alias: str = "") -> Verdict:
    """The value that a reward returned, as a Verdict. A bool counts as 0 or 1.

    Raises RewardError, which names the reward, for NaN, infinities, and values that are not a number, a Score or None.
    """
    if isinstance(returned, Score):
        if not isinstance(returned.parts, dict) or not all(isinstance(part, str) for part in returned.parts):
            raise RewardError(f"reward {name!r}: a Score's parts are a dict of numbers, got {shown(returned.parts)}")
        parts = {printable(part): _number(f"{name}.{part}", value) for part, value in returned.parts.items()}
        why = printable(returned.why) if isinstance(returned.why, str) else shown(returned.why)
        turns = _turn_numbers(name, returned.turns)
        value = sum(turns) if turns and returned.value is None else _number(name, returned.value)
        return Verdict(name, weight, value, parts, why, alias or name, turns)
    return Verdict(name, weight, _number(name, returned), {}, "", alias or name)


def check_turns(verdict: Verdict, count: int) -> Verdict:
    """The verdict. Raises RewardError if it has rewards by turn, and not one for each of `count` turns."""
    if verdict.turns and len(verdict.turns) != count:
        raise RewardError(
            f"reward {verdict.name!r} returned a Score with {len(verdict.turns)} turns, but the model had {count}; "
            "give one number for each turn (trajectory.turns)"
        )
    return verdict


def with_reason(verdict: Verdict, function: Any) -> Verdict:
    """The verdict of this function. If it returned None and gave no reason, the reason names its line."""
    if verdict.value is not None or verdict.why:
        return verdict
    place = place_of_function(function)
    return verdict._replace(why=f"{RETURNED_NONE} ({place})" if place else RETURNED_NONE)


def mix(verdicts: Sequence[Verdict], on_invalid: InvalidPolicy = "drop", base: Score | None = None) -> Score:
    """The weighted sum of the verdicts, with all parts. Both are added to `base`, an earlier score.

    Raises RewardError if a reward could not judge and the policy is `raise`.

    >>> mix([Verdict("correct", 1.0, 1.0), Verdict("short", -0.1, 2.0)]).value
    0.8
    >>> mix([Verdict("correct", 1.0, None)]).value is None
    True
    """
    parts: dict[str, float | None] = dict(base.parts) if base else {}
    reasons = [base.why] if base and base.why else []
    weights = dict(base.weights) if base else {}
    total = base.value if base else 0.0
    for verdict in verdicts:
        name = _free_name(verdict.name, verdict.alias, parts)
        parts[name] = verdict.value
        weights[name] = verdict.weight
        value = verdict.value
        if value is None:
            why = verdict.why or RETURNED_NONE
            if on_invalid == "raise":
                raise RewardError(
                    f"reward {verdict.name!r} could not judge a rollout: {why}; "
                    "with --on-invalid-reward drop such rollouts are left out"
                )
            reasons.append(f"{verdict.name} could not judge: {why}")
            value = 0.0 if on_invalid == "zero" else None
        elif verdict.why:
            reasons.append(f"{verdict.name}: {verdict.why}")
        total = None if total is None or value is None else total + verdict.weight * value
    for verdict in verdicts:  # after the rewards themselves, so that rewards keep their names
        for part, value in verdict.parts.items():
            parts[_free_name(part, verdict.name, parts)] = value
    return Score(total, parts, "; ".join(reasons), weights, [] if total is None else _mixed_turns(verdicts, base))


def turn_rewards(value: float, turns: Sequence[float], count: int) -> list[float]:
    """The reward of each of `count` turns, which add up to `value`. What `turns` do not have belongs to the last turn.

    >>> turn_rewards(2.0, [0.5, 0.5], 2), turn_rewards(1.0, [], 3)
    ([0.5, 1.5], [0.0, 0.0, 1.0])
    """
    found = [*turns, *[0.0] * (max(count, 1) - len(turns))]
    found[-1] += value - sum(found)
    return found


def _mixed_turns(verdicts: Sequence[Verdict], base: Score | None) -> list[float]:
    """The weighted sum of the rewards by turn; empty if no reward gave any."""
    given = [verdict.turns for verdict in verdicts] + [base.turns if base else ()]
    count = max(map(len, given))
    if count == 0:
        return []
    rows = [turn_rewards(base.value or 0.0, base.turns, count)] if base else []
    rows += [
        [verdict.weight * each for each in turn_rewards(verdict.value or 0.0, verdict.turns, count)]
        for verdict in verdicts
    ]
    return [sum(column) for column in zip(*rows, strict=True)]


def _turn_numbers(name: str, turns: Any) -> list[float]:
    if not isinstance(turns, list | tuple):
        raise RewardError(f"reward {name!r}: a Score's turns are a list of numbers, got {shown(turns)}")
    numbers = [_number(f"{name}, turn {place}", value) for place, value in enumerate(turns, start=1)]
    if any(number is None for number in numbers):
        raise RewardError(f"reward {name!r}: a Score's turns are numbers, got {shown(turns)}; write 0.0 for no reward")
    return [number for number in numbers if number is not None]


def _free_name(name: str, alias: str, taken: Mapping[str, Any]) -> str:
    chosen = name
    while chosen in taken:
        chosen = f"{alias or 'reward'}.{chosen}"
    return chosen


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    expected = "a reward returns a finite float, a Score, or None where it could not judge"
    if not hasattr(type(value), "__float__"):
        raise RewardError(f"reward {name!r} returned {shown(value)} ({type(value).__name__}); {expected}")
    try:
        with authors_code():
            number = float(value)
    except Exception as error:  # a class of the author may raise anything
        raise RewardError(
            f"reward {name!r} returned {shown(value)}, which is no number: {message_of(error)}"
        ) from error
    if not math.isfinite(number):
        raise RewardError(f"reward {name!r} returned {number}; {expected}")
    return number


# --- asking one reward ------------------------------------------------------------------------------------------------


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
    if TURN not in requests:
        read = functools.partial(_read_list if is_list_by_turn(function) else read_verdict, name, weight)
        arguments = (available[request] for request in requests)
        verdict: Verdict = await calls.call(bound, *arguments, timeout_seconds=seconds, convert=read)
        return check_turns(verdict, trajectory.turns)
    import trio

    deadline = trio.current_time() + seconds
    found: list[Verdict] = []
    for turn in trajectory.turn_messages:
        read = functools.partial(read_verdict, f"{name}, turn {turn.index + 1}", weight)
        arguments = ({**available, TURN: turn}[request] for request in requests)
        left = max(deadline - trio.current_time(), 0.0)
        found.append(await calls.call(bound, *arguments, timeout_seconds=left, convert=read))
        if found[-1].turns:
            raise RewardError(
                f"reward {name!r} is asked about one turn, and returned a Score with turns; return the reward of "
                "`turn` alone"
            )
    return _joined(found, name, weight)


def is_list_by_turn(function: Callable[..., Any]) -> bool:
    """Whether the function is marked `@reward(per="turn")`: if it does not name `turn`, it returns a list."""
    mark = mark_of(getattr(function, "__func__", function), REWARD_MARK)
    return mark is not None and mark[-1] == TURN


def _joined(found: Sequence[Verdict], name: str, weight: float) -> Verdict:
    """The verdict of a rollout from those of its turns: values and parts are added up. If the reward could not judge
    one turn, it could not judge the rollout.
    """
    turns = list(enumerate(found, start=1))
    unjudged = [f"turn {turn}: {verdict.why or RETURNED_NONE}" for turn, verdict in turns if verdict.value is None]
    if unjudged or not found:
        return Verdict(name, weight, None, {}, unjudged[0] if unjudged else NO_TURN, name)
    values = [verdict.value or 0.0 for verdict in found]
    parts: dict[str, float | None] = {}
    for verdict in found:
        for part, value in verdict.parts.items():
            parts[part] = (parts.get(part) or 0.0) + (value or 0.0)
    words = "; ".join(f"turn {turn}: {verdict.why}" for turn, verdict in turns if verdict.why)
    return Verdict(name, weight, sum(values), parts, words, name, values)


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
