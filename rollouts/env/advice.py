"""Warnings about an environment that works, but probably not as its author intended.

Not here: environments that cannot work (`checks`).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

from rollouts.author_code import Place, place_of_function
from rollouts.env.authoring import (
    METRIC_MARK,
    REWARD_MARK,
    TOOL_MARK,
    WorkerEnvironment,
    environment_name,
    mark_of,
    tools_of,
)
from rollouts.env.methods import INPUTS, names_input
from rollouts.env.schema import schema_of

CONTRACT = ("tasks", "demonstrations", "shared", "setup", "tools", "close", "reply", "rollout", "state", "restore")
"""The names of the methods that the core calls."""

SIMILARITY_MIN = 0.85  # difflib's ratio, above which a name is taken for `setup` (`set_up`) or `state` (not `start`)
OTHER_WORDS = {
    "clean_up": "close", "cleanup": "close", "finish": "close", "shutdown": "close", "tear_down": "close",
    "teardown": "close", "before_episode": "setup", "on_start": "setup", "start_episode": "setup",
    "answer": "reply", "env_response": "reply", "env_reply": "reply", "next_message": "reply", "respond": "reply",
    "response": "reply", "user_turn": "reply", "run_episode": "rollout", "run_rollout": "rollout",
    "get_state": "state", "save_state": "state", "state_dict": "state", "load_state": "restore",
    "load_state_dict": "restore", "restore_state": "restore", "set_state": "restore",
    "get_tools": "tools", "list_tools": "tools", "task_tools": "tools", "tools_for": "tools",
    "demos": "demonstrations", "examples": "demonstrations", "get_demonstrations": "demonstrations",
}  # fmt: skip
"""Other names for these methods, as other libraries and authors use them."""


class EnvironmentWarning(UserWarning):
    """An environment works, but probably not as its author intended."""


def warn_about(env: Any) -> None:
    """Issue an EnvironmentWarning for each method whose name is nearly one that the core calls, for each tool without a
    docstring, and for a `shared` that no method names. `env` is a class or an object that passed `check_environment`.
    """
    for file, line, words in env.remote_warnings() if isinstance(env, WorkerEnvironment) else warnings_about(env):
        warnings.warn_explicit(words, EnvironmentWarning, file, line)


def warnings_about(env: Any) -> list[tuple[str, int, str]]:
    """The warnings of `warn_about`: file, line, words."""
    found = [*_near_misses(env), *_undocumented(env), *_unused(env)]
    places = [place_of_function(function) or Place(environment_name(env), 0, "") for function, _ in found]
    return [(place.file, place.line, words) for place, (_, words) in zip(places, found, strict=True)]


def _near_misses(env: Any) -> Iterator[tuple[Callable[..., Any], str]]:
    label, missing = environment_name(env), [name for name in CONTRACT if not hasattr(env, name)]
    cls = env if inspect.isclass(env) else type(env)
    for name in dir(cls):
        raw = inspect.getattr_static(cls, name)
        is_marked = any(mark_of(raw, mark) is not None for mark in (TOOL_MARK, REWARD_MARK, METRIC_MARK))
        if name.startswith("_") or name in CONTRACT or is_marked or not inspect.isfunction(raw):
            continue
        meant = OTHER_WORDS.get(name) or next(iter(get_close_matches(name, missing, 1, SIMILARITY_MIN)), None)
        if meant in missing:
            yield (
                raw,
                f"{label}.{name} is never called by rollouts; did you mean `{meant}`? If it is a helper, ignore this, "
                f"or name it `_{name}`",
            )


def _undocumented(env: Any) -> Iterator[tuple[Callable[..., Any], str]]:
    for tool in tools_of(env):
        if not schema_of(tool)["function"]["description"]:
            yield (
                tool.function,
                f"the tool {environment_name(env)}.{tool.name} has no docstring, so the model is shown no description "
                'of it; write one below its `def`, such as """Evaluate an arithmetic expression."""',
            )


def _unused(env: Any) -> Iterator[tuple[Callable[..., Any], str]]:
    takes = [name for name, inputs in INPUTS.items() if "shared" in inputs]
    if hasattr(env, "shared") and not any(names_input(env, name, "shared") for name in takes):
        yield (
            env.shared,
            f"{environment_name(env)}.shared is never called, because no method names `shared`; write "
            f"`def setup(self, task, shared)` ({', '.join(takes)} may name it)",
        )
