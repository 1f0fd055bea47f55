"""Checks of curricula: the weight of an environment at each step."""

from __future__ import annotations

import math
from typing import Any

from rollouts.author_code import shown
from rollouts.plugins.signature import call_with
from rollouts_check.components.subject import Function, Subject, at, trying
from rollouts_check.report import FailedError

STEPS = (0, 1, 2, 10, 99, 100, 101, 1_000, 100_000, 10_000_000)


def trial(subject: Subject, function: Function) -> Any:
    """The weights of the first steps."""
    return [call_with(function, {"step": step}) for step in STEPS]


def values(subject: Subject) -> str:
    """It returns a finite weight of 0 or more for every step, and more than 0 for some."""
    found = {}
    for step in STEPS:
        tried = f"call it at step {step:,}"
        with trying(tried):
            weight = call_with(subject.function, {"step": step})
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight < 0:
            seen = f"it returned {shown(weight)}{at(subject.function)}"
            raise FailedError(tried, seen, "return a number of 0 or more: the weight among those of all environments")
        found[step] = float(weight)
    if not any(found.values()):
        seen = f"the weight is 0 at all of them{at(subject.function)}"
        raise FailedError(f"call it at steps 0 to {STEPS[-1]:,}", seen, "return a weight above 0 at some steps")
    return f"{found[0]:g} at first, {found[STEPS[-1]]:g} at last"
