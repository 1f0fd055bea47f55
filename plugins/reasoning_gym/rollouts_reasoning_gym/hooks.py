"""Names `reasoning_gym/<data set>`. The upstream package is imported when one of these names is asked for."""

from __future__ import annotations

from typing import Any

from rollouts import hookimpl

PREFIX = "reasoning_gym/"


@hookimpl
def rollouts_find_component(kind: str, name: str) -> Any:
    if kind != "environments" or not name.startswith(PREFIX):
        return None
    from rollouts_reasoning_gym import environment_of

    return environment_of(name.removeprefix(PREFIX))


@hookimpl
def rollouts_list_components(kind: str) -> dict[str, str] | None:
    if kind != "environments":
        return None
    from rollouts_reasoning_gym.entries import about, data_set_names

    return {PREFIX + name: about(name) for name in data_set_names()}
