"""The version of the contract that a distribution states, and the versions that rollouts runs.

    [project.entry-points."rollouts.contract"]
    version = "1"

The contract is docs/contract.md. A distribution that states nothing is of version 1. When there is a version 2, this is
where a component of version 1 gets its shim. Not here: what the contract says (`rollouts.env`, `vocabulary`).
"""

from __future__ import annotations

import re

from rollouts.config.names import normalize
from rollouts.errors import BrokenPluginError
from rollouts.plugins.index import HOOKS, KIND_WORDS, ComponentRef
from rollouts.version import __version__

GROUP = "rollouts.contract"
VERSIONS = ("1",)
"""The versions of the contract whose components run here, the newest last."""

CORE = "rollouts-rl"
"""The distribution of the core, whose own components state nothing."""


def stated_version(distribution: str) -> str | None:
    """The version that an installed distribution states, as it is written; None if it states none."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import distribution as find

    try:
        found = find(distribution).entry_points
    except (PackageNotFoundError, ValueError):
        return None
    return next((point.value for point in found if point.group == GROUP and point.name == "version"), None)


def check_contract(ref: ComponentRef) -> None:
    """Raise BrokenPluginError if the distribution of a component states a version that does not run here.

    `1` and `v1` are the same version, because setuptools accepts only an identifier as the value of an entry point. A
    file is of version 1.
    """
    if not ref.distribution or normalize(ref.distribution) == CORE:
        return
    stated = stated_version(ref.distribution)
    if stated is None or stated.removeprefix("v") in VERSIONS:
        return
    word = "hook plugin" if ref.kind == HOOKS else KIND_WORDS[ref.kind]
    owner, newest = f"{ref.distribution} {ref.version}: its {word} {ref.name!r}", VERSIONS[-1]
    known = f"rollouts {__version__} runs version {newest}"
    if not re.fullmatch(r"v?[1-9][0-9]*", stated):
        raise BrokenPluginError(
            f"{owner} states the contract version {stated!r}, and {known}\n"
            f'write in its pyproject.toml: [project.entry-points."{GROUP}"], and below it: version = "{newest}"'
        )
    raise BrokenPluginError(
        f"{owner} is written for version {stated.removeprefix('v')} of the contract; {known}\n"
        f"type: pip install --upgrade rollouts-rl, or install another release: pip install '{ref.distribution}!="
        f"{ref.version}'"
    )
