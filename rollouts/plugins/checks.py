"""A component's own check of its settings, made when a run is composed: before a model loads, and in a dry run.

A factory that would refuse some settings only after it has loaded something says so with `checked_by`. Left out: what
every component's signature is held to (`signature`).
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
    """Have `check` called with everything that the component will be given, by name: what it requests, and its
    keyword-only parameters, defaults included (a dataclass as one instance). It raises ConfigError, or nothing.

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
    """Each is (flag, what was given, whether it holds, what is expected). Raises ConfigError for the first that does
    not hold.
    """
    for flag, given, holds, expected in bounds:
        if not holds:
            raise ConfigError(f"{flag} {list(given) if isinstance(given, tuple) else given}: expected {expected}")


def one_of(flag: str, given: Any, choices: Sequence[str]) -> tuple[str, Any, bool, str]:
    """The bound of a setting that is one of a few words."""
    near = near_misses(str(given), choices)
    hint = f"; did you mean {near[0]}?" if near else ""
    return flag, given, given in choices, f"one of {', '.join(choices)}{hint}"


def run_check(component: Callable[..., Any], available: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Call the component's check, if it has one. Raises what the check raises, and what a dataclass raises that is
    made of settings.
    """
    keywords = keywords_of(component, settings)
    check = getattr(component, _ATTRIBUTE, None)
    if check is None:
        return
    parameters = inspect.signature(component).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
    check({**defaults, **available, **keywords})
