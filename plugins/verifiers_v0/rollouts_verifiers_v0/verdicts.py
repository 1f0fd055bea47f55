"""Rewards that could not judge.

Upstream logs the exception of a reward function and counts 0. Here there is no verdict.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

failures: ContextVar[list[str] | None] = ContextVar("rollouts-verifiers-v0-failures", default=None)
"""The exceptions of reward functions in the rollout that is being scored."""


def record_failures(env: Any) -> None:
    """Let each reward function of an environment that has a weight write its exceptions to `failures`."""
    for rubric in _rubrics(env):
        rubric.funcs = [
            _recorded(function) if weight else function
            for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
        ]


def _rubrics(env: Any) -> Iterator[Any]:
    """The rubrics of an environment and of those in it, each once."""
    seen: dict[int, Any] = {}
    waiting = [env.rubric, *(part.rubric for part in getattr(env, "envs", ()))]
    while waiting:
        rubric = waiting.pop()
        if id(rubric) not in seen:
            seen[id(rubric)] = rubric
            waiting += getattr(rubric, "rubrics", [])
            waiting += [part.rubric for part in getattr(rubric, "env_map", {}).values()]
    yield from seen.values()


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    name = getattr(function, "__name__", repr(function))

    def note(error: Exception) -> None:
        if (noted := failures.get()) is not None:
            noted.append(f"{name} raised {type(error).__name__}: {error}")

    async def awaited(result: Any) -> Any:
        try:
            return await result
        except Exception as error:
            note(error)
            raise

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            note(error)
            raise
        return awaited(result) if inspect.isawaitable(result) else result

    return called
