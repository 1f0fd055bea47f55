"""What differs between runs: their settings, and which of them have the same held-out tasks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts.reducers import Reducer, stderr
from rollouts.runs.comparing import Evaluation
from rollouts.runs.folder import read_settings

_OWN_TO_A_RUN = ("out",)


def differing_settings(folders: Sequence[Path]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs, each with its value in every run; None where a run has no such
    setting. The names are those of flags, such as `env.digits`. Raises ConfigError.

    Modes have different settings. So if the modes differ, a setting counts only if runs that have it differ in it.
    """
    flat = [dict(_flat(read_settings(folder))) for folder in folders]
    is_one_mode = len({settings.get("mode") for settings in flat}) == 1
    names = dict.fromkeys(name for settings in flat for name in settings if name not in _OWN_TO_A_RUN)
    found = {}
    for name in names:
        row = [settings.get(name) for settings in flat]
        compared = row if is_one_mode else [value for value in row if value is not None]
        if any(value != compared[0] for value in compared):
            found[name] = row
    return found


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The settings in nested tables, by dotted names. The name of a component is the setting of its kind."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            is_component = key == "name" and name
            yield from _flat(inner, name if is_component else f"{name}.{key}" if name else key)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for index, each in enumerate(value):
            yield from _flat(each, f"{name}[{index}]")
    else:
        yield name.replace("_", "-"), value


def reduced_evaluations(
    evaluations: Sequence[Evaluation], rewards: Mapping[str, float], reducer: Reducer
) -> list[Evaluation]:
    """A run's evaluations, the last one with the mean of these rewards of its tasks, which `reducer` has reduced."""
    if not evaluations or not rewards:
        return list(evaluations)
    values = list(rewards.values())
    last = evaluations[-1]._replace(reward=statistics.fmean(values), stderr=stderr(values), reduce=reducer.how)
    return [*evaluations[:-1], last]


def opponents_of(rewards: Sequence[Mapping[str, float]]) -> list[int | None]:
    """For each run, by its rewards of tasks: the first other run that was judged on two or more of the same tasks. So
    evaluations of several environments are compared within each of them. None for a run that is the first one of its
    tasks, or the only one.

    >>> opponents_of([{"a": 1, "b": 0}, {"c": 1, "d": 1}, {"a": 0, "b": 0}, {"c": 0, "d": 1}, {}])
    [None, None, 0, 1, None]
    """
    found: list[int | None] = []
    for place, own in enumerate(rewards):
        earlier = range(place)
        found.append(next((each for each in earlier if len(own.keys() & rewards[each].keys()) >= 2), None))
    return found
