"""The hooks of a package that offers environments whose names are not fixed, such as `gym/CartPole-v1`.

    rollouts_find_component, rollouts_list_components = environment_families(
        {"gym": Family("acme_gym:environment_of", "acme_gym:names", needs="gymnasium")}
    )

The functions are imported when one of the names is asked for, or all are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any, NamedTuple

from rollouts.plugins.hookspecs import hookimpl


class Family(NamedTuple):
    """Environments whose names have one prefix.

    Args:
        find: `module:function` that returns the environment of a name without the prefix; None if there is none
        names: `module:function` that returns these names, or a dict from them to descriptions
        needs: a module without which there are no such environments
    """

    find: str
    names: str
    needs: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether there is the module that it needs."""
        return not self.needs or find_spec(self.needs) is not None


def environment_families(families: Mapping[str, Family]) -> tuple[Callable[[str, str], Any], Callable[[str], Any]]:
    """The hooks `rollouts_find_component` and `rollouts_list_components` of families, by their prefixes."""

    @hookimpl
    def find(kind: str, name: str) -> Any:
        prefix, _, own = name.partition("/")
        family = families.get(prefix) if kind == "environments" and own else None
        return resolve_name(family.find)(own) if family is not None and family.is_installed else None

    @hookimpl
    def listed(kind: str) -> dict[str, str] | None:
        if kind != "environments":
            return None
        found: dict[str, str] = {}
        for prefix, family in families.items():
            names = resolve_name(family.names)() if family.is_installed else ()
            abouts = names if isinstance(names, Mapping) else dict.fromkeys(names, "")
            found |= {f"{prefix}/{name}": about for name, about in abouts.items()}
        return found

    return find, listed
