"""A component's own check of its settings, before a model loads and in a dry run.

Use `checked_by` if your component would otherwise refuse a setting only after it has loaded something.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rollouts.errors import ConfigError, near_misses
from rollouts.plugins.signature import keywords_of

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "__rollouts_check__"


def checked_by(check: Callable[[Mapping[str, Any]], None]) -> Callable[[F], F]:
    """Decorator for a component: before a model loads and in a dry run, `check(values)` is called. It must raise
    ConfigError for a wrong value.

    `values` maps names to the inputs of the component and to its keyword-only parameters, with their defaults. A
    parameter whose default is a dataclass is one value.

    >>> def positive(values):
    ...     if values["size"] < 1:
    ...         raise ValueError("size")
    >>> @checked_by(positive)
    ... def make(model, *, size: int = 3): ...
    >>> run_check(make, {"model": "tiny"}, {})
    >>> run_check(make, {"model": "tiny"}, {"size": 0})
    Traceback (most recent call last):
    ValueError: size
    """

    def mark(component: F) -> F:
        setattr(component, _ATTRIBUTE, check)
        return component

    return mark


def check_bounds(*bounds: tuple[str, Any, bool, str]) -> None:
    """Raise ConfigError for the first bound that does not hold. A bound is (flag, given value, whether the value is
    valid, a text for the valid values).
    """
    for flag, given, holds, expected in bounds:
        if not holds:
            raise ConfigError(f"{flag} {list(given) if isinstance(given, tuple) else given}: expected {expected}")


def one_of(flag: str, given: Any, choices: Sequence[str]) -> tuple[str, Any, bool, str]:
    """The bound for a setting that must be one of `choices`, for `check_bounds`."""
    near = near_misses(str(given), choices)
    hint = f"; did you mean {near[0]}?" if near else ""
    return flag, given, given in choices, f"one of {', '.join(choices)}{hint}"


def run_check(component: Callable[..., Any], available: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Call the component's check, if it has one. Raises what the check raises, and ConfigError if a dataclass refuses
    its settings.
    """
    keywords = keywords_of(component, settings)
    check = getattr(component, _ATTRIBUTE, None)
    if check is None:
        return
    parameters = inspect.signature(component).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
    check({**defaults, **available, **keywords})
