"""Rewards of several packages, mixed by weight into one Score.

A reward that returns None or raises an exception *could not judge*. What follows depends on the policy `on_invalid`:
`drop` (the score's value is None: the rollout does not count in the baseline and is not trained), `zero` (the reward
counts as 0), or `raise` (RewardError). If a reward returns NaN, an infinity or a value that is not a number,
RewardError is raised under every policy; its message names the reward.

Each part is logged under its own name: a reward function under its alias, a `@reward` method of the environment under
the method's name, and the entries of `Score.parts` under their keys. If two names are equal, the later one gets its
alias as a prefix: `env.correct`, `brevity.words`. Not here: running rewards (`rollouts.agent.episode`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rollouts.author_code import authors_code, message_of, place_of_function, printable, shown
from rollouts.errors import RewardError
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
