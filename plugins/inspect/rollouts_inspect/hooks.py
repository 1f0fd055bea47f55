"""Names `inspect/<package>/<task>`. The upstream package is imported when one of these names is asked for."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from rollouts import hookimpl

PREFIX = "inspect/"


@hookimpl
def rollouts_find_component(kind: str, name: str) -> Any:
    if kind != "environments" or not name.startswith(PREFIX) or find_spec("inspect_ai") is None:
        return None
    from rollouts_inspect import environment_of

    return environment_of(name.removeprefix(PREFIX))


@hookimpl
def rollouts_list_components(kind: str) -> list[str] | None:
    if kind != "environments" or find_spec("inspect_ai") is None:
        return None
    from rollouts_inspect.loading import names

    return [PREFIX + name for name in names()]
