"""`on_step`: functions of a program that a run calls after each step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rollouts.author_code import authors_code, shown, unwrapped
from rollouts.config.objects import label_of
from rollouts.env import calls
from rollouts.errors import RolloutsError, RunError, words_of
from rollouts.training.rollout_gen.groups import Group


class FinishedStep(NamedTuple):
    """What a function of `on_step` gets.

    `step` counts from 0. `metrics` are those that will be logged, the `eval/` metrics of an evaluation after this step
    included. `groups` are the step's rollouts, one group for each prompt: `group.task`, `group.rewards`, and in
    `group.episodes` each rollout with its `trajectory`, `score` and `status`. Mode sft has no groups.
    """

    step: int
    metrics: Mapping[str, float]
    groups: Sequence[Group] = ()


async def call_on_step(functions: Sequence[Callable[..., Any]], finished: FinishedStep) -> dict[str, float]:
    """Call each function, in order. Returns the metrics that they returned.

    A plain function runs in the program's main thread, and the run waits for it. Raises RunError, with the author's
    line, if a function raises or returns anything but a dict of numbers or None.
    """
    found: dict[str, float] = {}
    for function in functions:
        label = f"on_step: {label_of(function)}"
        try:
            numbers = _numbers(label, await _called(function, finished))
        except RolloutsError:
            raise
        except Exception as error:  # the function may raise anything
            raise RunError(f"{label} raised {words_of(error)} after step {finished.step}") from error
        taken = [name for name in numbers if name in finished.metrics or name in found]
        if taken:
            raise RunError(
                f"{label} returned the metric {taken[0]!r}, which the step has already; give it another name"
            )
        found |= numbers
    return found


async def _called(function: Callable[..., Any], finished: FinishedStep) -> Any:
    inner = unwrapped(function)
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None)):  # noqa: B004
        return await calls.call(function, finished)
    with authors_code():
        returned = function(finished)
    return await calls.call(lambda: returned) if inspect.iscoroutine(returned) else returned


def _numbers(label: str, returned: Any) -> dict[str, float]:
    """The metrics that a function returned. Raises RunError."""
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise RunError(f"{label} returned {shown(returned)}; expected a dict of metrics, or None")
    numbers: dict[str, float] = {}
    for name, value in returned.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise RunError(f"{label} returned {shown(value)} as {shown(name)}; expected a number") from error
    return numbers
