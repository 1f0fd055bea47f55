"""Checks of aggregations: the weight u of each token, and a batch's part of the denominator D."""

from __future__ import annotations

import math
from typing import Any

from rollouts.author_code import shown
from rollouts.training.algorithms.aggregation import Masks, TokenWeights, aggregate
from rollouts_check.components.common import Function, Subject

MAX_TOKENS = 16
SLACK = 1e-9
ROWS = Masks(
    masks=[[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0, 1.0], [0.0, 0.5, 0.5], [0.0, 1.0], [0.0, 0.0, 1.0, 1.0]],
    rollout_index=[0, 1, 1, 2, 3],
    group_index=[0, 0, 0, 1, 1],
    pair_index=[0, 0, 0, 1, 1],
    max_tokens=MAX_TOKENS,
)
"""Four rollouts of two prompts. The second rollout has two rows, and one row has float weights."""

EMPTY = ROWS._replace(masks=[[0.0] * len(mask) for mask in ROWS.masks])
CHANGE = "return TokenWeights(weights, denominator), with one weight of 0 or more for each token of each row"


def trial(subject: Subject, function: Function) -> TokenWeights:
    """The weights of the usual rows."""
    return aggregate(function, ROWS)


def values(subject: Subject) -> str:
    """It returns a finite weight of 0 or more for each token, and a denominator above 0."""
    with subject.trying("call it on five rows of four rollouts", CHANGE) as attempt:
        found = aggregate(subject.function, ROWS)
    flat, d = [weight for row in found.weights for weight in row], found.denominator
    attempt.require(all(math.isfinite(each) and each >= 0 for each in flat), f"the weights are {shown(found.weights)}")
    change = "return the part of D that these rows add: above 0 if a token is trained"
    attempt.require(math.isfinite(d) and d > 0, f"the denominator is {d}", change)
    attempt.require(any(flat), "every weight is 0", "give live tokens a weight above 0")
    return f"one value for each {found.unit}"


def masked(subject: Subject) -> None:
    """Tokens with a mask of 0 have the weight 0.

    Advice: multiply the weight by the mask
    """
    found = aggregate(subject.function, ROWS)
    attempt = subject.attempt("look at the weights of masked tokens")
    for number, (weights, mask) in enumerate(zip(found.weights, ROWS.masks, strict=True)):
        for place, (weight, live) in enumerate(zip(weights, mask, strict=True)):
            attempt.require(live or not weight, f"token {place} of row {number} has the weight {weight:g}")


def nothing_live(subject: Subject) -> None:
    """Rows without a trained token do no harm: there is no exception, and the denominator is finite.

    Advice: a rollout without trained tokens may occur: do not divide by its number of tokens
    """
    with subject.trying("call it on rows whose masks are all 0") as attempt:
        found = aggregate(subject.function, EMPTY)
    attempt.require(math.isfinite(found.denominator), f"the denominator is {found.denominator}")
    one = ROWS._replace(masks=[ROWS.masks[0], *EMPTY.masks[1:]])
    with subject.trying("call it on rows of which only the first one has trained tokens"):
        aggregate(subject.function, one)


def order(subject: Subject) -> None:
    """The order of the rows has no effect on their weights and on the denominator.

    Advice: find rows by rollout_index
    """
    first = aggregate(subject.function, ROWS)
    places = [4, 2, 0, 3, 1]
    columns = [(name, column) for name, column in ROWS._asdict().items() if name != "max_tokens"]
    picked: dict[str, Any] = {name: [column[place] for place in places] for name, column in columns}
    again = aggregate(subject.function, ROWS._replace(**picked))
    wanted = [first.weights[place] for place in places]
    rows = zip([[first.denominator], *wanted], [[again.denominator], *again.weights], strict=True)
    pairs = [pair for row, theirs in rows for pair in zip(row, theirs, strict=True)]
    seen = f"D and the weights were {first.denominator:g}, {shown(wanted, 80)}, then {again.denominator:g}, "
    seen += shown(again.weights, 80)
    attempt = subject.attempt(f"call it on the rows in the order {places}")
    attempt.require(all(abs(one - other) <= SLACK for one, other in pairs), seen)
