"""What a method of an environment may name besides its arguments, such as `shared` in `setup(self, task, shared)`.

The arguments are passed in their order, whatever their names are. Inputs are passed by name, and may have any place
among the parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

INPUTS: Mapping[str, tuple[str, ...]] = {
    "tasks": ("shared",),
    "demonstrations": ("shared",),
    "setup": ("shared", "sandbox"),
}
"""The inputs that each method may name."""


def inputs_of(method: Any, name: str) -> tuple[str, ...]:
    """The inputs that a method names; `name` is the name under which the core calls it."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):  # there is no such method, or its signature is not readable
        return ()
    return tuple(each for each in INPUTS.get(name, ()) if each in parameters)


def names_input(env: Any, method: str, name: str) -> bool:
    """Whether a method of the environment (a class or an object) names this input."""
    return name in inputs_of(getattr(env, method, None), method)


def with_inputs(method: Callable[..., Any], arguments: Sequence[Any], inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """A function and the arguments to call it with: the method gets its arguments in order, and its inputs by name.

    >>> def setup(shared, task, sandbox=None): return shared, task, sandbox
    >>> call, *arguments = with_inputs(setup, ["a task"], {"shared": "an index"})
    >>> call(*arguments)
    ('an index', 'a task', None)
    """
    if not inputs:
        return (method, *arguments)
    rest: Iterator[Any] = iter(arguments)
    positional: list[Any] = []
    named = dict(inputs)
    for parameter in inspect.signature(method).parameters.values():
        if parameter.name in inputs or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            named.update((parameter.name, value) for value in [next(rest, _NONE)] if value is not _NONE)
        else:
            positional += [next(rest)] if parameter.kind is parameter.POSITIONAL_ONLY else rest
    return (functools.partial(method, **named), *positional, *rest)


_NONE = object()
