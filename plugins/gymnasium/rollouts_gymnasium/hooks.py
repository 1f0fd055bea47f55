"""The names `gym/<id>` and `gem/<id>`. Importing this module imports neither gymnasium nor gem."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from rollouts import hookimpl

PACKS = {
    "gym": ("gymnasium", "rollouts_gymnasium.environment", "rollouts_gymnasium.registry"),
    "gem": ("gem", "rollouts_gymnasium.gem", "rollouts_gymnasium.gem"),
}
"""For each pack: the package that it needs, the module with `environment_class(id)`, and that with `served_ids()`."""


@hookimpl
def rollouts_find_component(kind: str, name: str) -> Any:
    """The environment class of `gym/<id>` or `gem/<id>`."""
    pack, _, env_id = name.partition("/")
    if kind != "environments" or pack not in PACKS or not env_id:
        return None
    return importlib.import_module(PACKS[pack][1]).environment_class(env_id)


@hookimpl
def rollouts_list_components(kind: str) -> dict[str, str] | None:
    """The environments whose packages are installed, each with what it is."""
    if kind != "environments":
        return None
    listed = [pack for pack, (package, _, _) in PACKS.items() if find_spec(package) is not None]
    about: dict[str, str] = {}
    for pack in listed:
        module = importlib.import_module(PACKS[pack][2])
        about |= {f"{pack}/{name}": module.about(name) for name in module.served_ids()}
    return about
