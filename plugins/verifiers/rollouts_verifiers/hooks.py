"""Names `verifiers/<taskset>`. The upstream package is imported when one of these names is asked for."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from rollouts import hookimpl

PREFIX = "verifiers/"


@hookimpl
def rollouts_find_component(kind: str, name: str) -> Any:
    if kind != "environments" or not name.startswith(PREFIX) or find_spec("verifiers") is None:
        return None
    from rollouts_verifiers import environment_of

    return environment_of(name.removeprefix(PREFIX))


@hookimpl
def rollouts_list_components(kind: str) -> list[str] | None:
    if kind != "environments" or find_spec("verifiers") is None:
        return None
    from rollouts_verifiers.catalog import taskset_names

    return [PREFIX + name for name in taskset_names()]
