"""Checks of aggregations: the weight u of each token, and a batch's part of the denominator D."""

from __future__ import annotations

import math
from typing import Any

from rollouts.author_code import shown
from rollouts.training.algorithms.aggregation import Masks, TokenWeights, aggregate
from rollouts_check.components.common import Function, Subject, trying

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
    tried = "call it on five rows of four rollouts"
    with trying(tried, CHANGE, subject.function):
        found = aggregate(subject.function, ROWS)
    flat = [weight for row in found.weights for weight in row]
    if not all(math.isfinite(weight) and weight >= 0 for weight in flat):
        raise subject.failed(tried, f"the weights are {shown(found.weights)}", CHANGE)
    if not (math.isfinite(found.denominator) and found.denominator > 0):
        seen = f"the denominator is {found.denominator}"
        raise subject.failed(tried, seen, "return the part of D that these rows add: above 0 if a token is trained")
    if not any(flat):
        raise subject.failed(tried, "every weight is 0", "give live tokens a weight above 0")
    return f"one value for each {found.unit}"


def masked(subject: Subject) -> None:
    """Tokens with a mask of 0 have the weight 0."""
    found = aggregate(subject.function, ROWS)
    for number, (weights, mask) in enumerate(zip(found.weights, ROWS.masks, strict=True)):
        for place, (weight, live) in enumerate(zip(weights, mask, strict=True)):
            if live == 0 and weight != 0:
                seen = f"token {place} of row {number} has the weight {weight:g}"
                raise subject.failed("look at the weights of masked tokens", seen, "multiply the weight by the mask")


def nothing_live(subject: Subject) -> None:
    """Rows without a trained token do no harm: there is no exception, and the denominator is finite."""
    tried = "call it on rows whose masks are all 0"
    with trying(tried, "a rollout without trained tokens may occur: do not divide by its number of tokens"):
        found = aggregate(subject.function, EMPTY)
    if not math.isfinite(found.denominator):
        raise subject.failed(tried, f"the denominator is {found.denominator}", "count live rollouts only")
    one = ROWS._replace(masks=[ROWS.masks[0], *EMPTY.masks[1:]])
    with trying("call it on rows of which only the first one has trained tokens"):
        aggregate(subject.function, one)


def order(subject: Subject) -> None:
    """The order of the rows has no effect on their weights and on the denominator."""
    first = aggregate(subject.function, ROWS)
    places = [4, 2, 0, 3, 1]
    columns = [(name, column) for name, column in ROWS._asdict().items() if name != "max_tokens"]
    picked: dict[str, Any] = {name: [column[place] for place in places] for name, column in columns}
    again = aggregate(subject.function, ROWS._replace(**picked))
    wanted = [first.weights[place] for place in places]
    is_same = all(
        abs(one - other) <= SLACK
        for row, theirs in zip(again.weights, wanted, strict=True)
        for one, other in zip(row, theirs, strict=True)
    )
    if not is_same or abs(first.denominator - again.denominator) > SLACK:
        seen = f"D was {first.denominator:g} and is {again.denominator:g}, the weights were {shown(wanted, 80)} and are"
        tried, seen = f"call it on the rows in the order {places}", f"{seen} {shown(again.weights, 80)}"
        raise subject.failed(tried, seen, "find rows by rollout_index")
