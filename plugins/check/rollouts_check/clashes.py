"""Environments whose packages clash with those of the running Python. `rollouts plugins doctor` shows them.

If two environments here want different versions of a package, the installed one clashes with one of them. Only
installed metadata is read, and nothing is imported. A requirement with an address is not compared, nor one whose
condition (`; python_version < "3.12"`) does not hold in the running Python.
"""

from __future__ import annotations

from importlib.metadata import distribution
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from rollouts.config.names import normalize
from rollouts.env.installing import all_installed, package_of, requirements_of
from rollouts.plugins import index
from rollouts.plugins.loading import CORE


class Clashes(NamedTuple):
    """One line for each clash. `remarks` are clashes of an environment that has a virtual environment of its own."""

    faults: list[str]
    remarks: list[str]


def find_clashes() -> Clashes:
    """The requirements of environments that the running Python does not meet."""
    found = Clashes([], [])
    isolated = {normalize(each.install.package) for each in all_installed()}
    for package, environment in sorted(_environments().items()):
        for name, wanted in _versions(distribution(package).requires or []).items():
            if lack := _lack(name, wanted):
                line = f"environment {environment} ({package}) requires {name}{wanted}, but {lack}; "
                if package in isolated:
                    found.remarks.append(f"{line}{package} has a virtual environment of its own: --worker venv")
                else:
                    named = package_of(f"{package}/{environment}") or package
                    found.faults.append(f"{line}type: rollouts env install {named}, then --worker venv")
    return found


def _environments() -> dict[str, str]:
    """The distributions with environments, each with the name of its first one. rollouts itself is left out."""
    found: dict[str, str] = {}
    for ref in index.scan().components:
        package = normalize(ref.distribution)
        if ref.kind == "environments" and package != CORE and index.is_installed(ref.distribution):
            found.setdefault(package, ref.name)
    return found


def _versions(lines: list[str]) -> dict[str, SpecifierSet]:
    """The versions of each package that can be compared. A package on several lines has the versions of all of them."""
    found: dict[str, SpecifierSet] = {}
    for parsed in requirements_of(lines):
        if parsed.url is None:
            name = normalize(parsed.name)
            found[name] = found.get(name, SpecifierSet()) & parsed.specifier
    return found


def _lack(name: str, wanted: SpecifierSet) -> str:
    """Why the running Python does not meet a requirement; empty if it does."""
    if not index.is_installed(name):
        return f"{name} is not installed"
    installed = distribution(name).version or ""
    try:
        is_met = wanted.contains(Version(installed), prereleases=True)
    except InvalidVersion:
        return ""
    return "" if is_met else f"{name} {installed} is installed"
