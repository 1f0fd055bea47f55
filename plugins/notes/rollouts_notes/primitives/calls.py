"""Calls of the functions that you give to primitives. If one fails, the error names it and says how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rollouts.errors import ConfigError, RolloutsError, TrainingError, words_of
from rollouts.training.algorithms.algorithm import function_label

T = TypeVar("T")


def call_given(form: str, function: Callable[..., T], *given: Any, error: type[RolloutsError] = TrainingError) -> T:
    """Call a user's function. `form` is the documented call, such as "reward_fn(rollout)".

    Raises ConfigError if the function does not take these arguments, and `error` if it raises.

    >>> call_given("scorer(model, rollout)", lambda model: 1.0, "a model", "a rollout")
    Traceback (most recent call last):
    rollouts.errors.ConfigError: <lambda> cannot be called as scorer(model, rollout): too many positional arguments
    """
    try:
        return function(*given)
    except RolloutsError:
        raise
    except Exception as failure:  # a user's function may raise anything
        label = function_label(function)
        why = _why_not(function, given) if isinstance(failure, TypeError) else ""
        if why:
            raise ConfigError(f"{label} cannot be called as {form}: {why}") from failure
        raise error(f"the {form.partition('(')[0]} {label} raised {words_of(failure)}") from failure


def _why_not(function: Callable[..., Any], given: tuple[Any, ...]) -> str:
    """Why the function does not take these arguments; empty if it takes them, or if its signature is unknown."""
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        return "it is not callable" if not callable(function) else str(error)
    except ValueError:  # a builtin may have no readable signature
        return ""
    return ""
