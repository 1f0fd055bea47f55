"""The version of the environment contract that a distribution states, and the versions that rollouts runs.

    [project.entry-points."rollouts.contract"]
    version = "v1"

The contract is docs/contract.md. Not here: what it says (`rollouts.env`).
"""

from __future__ import annotations

import re

from rollouts.errors import BrokenPluginError
from rollouts.plugins.index import ComponentRef
from rollouts.version import __version__

GROUP = "rollouts.contract"
VERSIONS = ("1",)
"""The versions of the contract whose environments run here."""


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
    """Raise BrokenPluginError if the distribution of an environment states a version that does not run here.

    `1` and `v1` are the same version, because setuptools accepts only an identifier as the value of an entry point.
    """
    stated = stated_version(ref.distribution) if ref.distribution else None
    if stated is None or stated.removeprefix("v") in VERSIONS:
        return
    owner = f"{ref.distribution} {ref.version}: its environment {ref.name!r}"
    known = f"rollouts {__version__} runs version {VERSIONS[-1]}"
    if not re.fullmatch(r"v?[0-9]+", stated):
        raise BrokenPluginError(
            f"{owner} states the contract version {stated!r}, and {known}\n"
            f'write in its pyproject.toml: [project.entry-points."{GROUP}"], and below it: version = "v{VERSIONS[-1]}"'
        )
    raise BrokenPluginError(
        f"{owner} is written for version {stated.removeprefix('v')} of the environment contract; {known}\n"
        f"type: pip install --upgrade rollouts-rl, or install another release: pip install '{ref.distribution}!="
        f"{ref.version}'"
    )
