"""Environments whose packages clash: with the running Python, or with each other. `rollouts plugins doctor` shows them.

Only installed metadata is read, and nothing is imported. A requirement with an address is not compared, nor one whose
condition (`; python_version < "3.12"`) does not hold in the running Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib.metadata import distribution, distributions
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from rollouts.config.names import normalize
from rollouts.env.installing import all_installed, package_of, requirements_of
from rollouts.plugins import index
from rollouts.plugins.loading import CORE

_MANY = 10**9  # larger than a part of any real version


class Clashes(NamedTuple):
    """One line for each clash. `remarks` are clashes of an environment that has a virtual environment of its own."""

    faults: list[str]
    remarks: list[str]


class _Package(NamedTuple):
    """A distribution with environments. `own` means that it has a virtual environment of its own."""

    name: str
    environment: str
    requires: dict[str, SpecifierSet]
    is_here: bool
    own: bool

    @property
    def label(self) -> str:
        return f"environment {self.environment} ({self.name})"

    @property
    def way_out(self) -> str:
        """What to type."""
        if self.own:
            return f"{self.name} has a virtual environment of its own: --worker venv"
        named = package_of(f"{self.name}/{self.environment}") or self.name
        return f"type: rollouts env install {named}, then --worker venv"


def find_clashes() -> Clashes:
    """The requirements of environments that the running Python does not meet, and the pairs of environments whose
    requirements no version of a package can meet together.
    """
    found = Clashes([], [])
    packages = _packages()
    for package in packages:
        if package.is_here:
            for name, wanted in package.requires.items():
                if lack := _lack(name, wanted):
                    lines = found.remarks if package.own else found.faults
                    lines.append(f"{package.label} requires {name}{wanted}, but {lack}; {package.way_out}")
    for first, second in itertools.combinations(packages, 2):
        for name in first.requires.keys() & second.requires.keys():
            wants = [first.requires[name], second.requires[name]]
            if not can_meet(wants[0] & wants[1]):
                moved = first if first.own else second
                lines = found.remarks if moved.own else found.faults
                both = f"{first.label} requires {name}{wants[0]}, but {second.label} requires {name}{wants[1]}"
                lines.append(f"{both}; {moved.way_out}")
    return found


def _packages() -> list[_Package]:
    """The distributions with environments, here and in virtual environments, by name. rollouts itself is left out."""
    here: dict[str, tuple[str, list[str]]] = {}
    for ref in index.scan().components:
        is_core = normalize(ref.distribution) == CORE
        if ref.kind == "environments" and not is_core and index.is_installed(ref.distribution):
            lines = distribution(ref.distribution).requires or []
            here.setdefault(normalize(ref.distribution), (ref.name, lines))
    own: dict[str, tuple[str, list[str]]] = {}
    for each in all_installed():
        name = normalize(each.install.package)
        sites = each.venv.glob("lib/python*/site-packages")
        for found in distributions(path=[str(site) for site in sites]):
            if each.install.environments and normalize(found.metadata["Name"] or "") == name:
                own[name] = (each.install.environments[0], found.requires or [])
    return [
        _Package(name, environment, _versions(lines), name in here, name in own)
        for name, (environment, lines) in sorted((own | here).items())
    ]


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


def can_meet(wanted: SpecifierSet) -> bool:
    """Whether there can be a version that meets all clauses. If any version does, then so does one that they name, or
    one right before or right after these.

    >>> can_meet(SpecifierSet(">=1.2,<2,!=1.2.*")), can_meet(SpecifierSet("==2.0.0,<2"))
    (True, False)
    """
    around = (version for clause in wanted for version in _around(clause.version.removesuffix(".*")))
    return not len(wanted) or any(wanted.contains(version, prereleases=True) for version in around)


def _around(text: str) -> Iterator[Version]:
    """A version, one right after it, one right before it, and the same for the ends of its prefixes."""
    try:
        version = Version(text)
    except InvalidVersion:  # of a clause such as ===1.0-special
        return
    yield version
    whole = version.release
    prefixes = [whole[:length] for length in range(1, len(whole) + 1)]
    for release in [whole, *((*prefix[:-1], prefix[-1] + 1) for prefix in prefixes)]:
        last = max((place for place, part in enumerate(release) if part), default=None)
        before = [] if last is None else [(*release[:last], release[last] - 1, _MANY)]
        for parts in [release, (*release, 0, 0, 0, 1), *before]:
            yield Version(f"{version.epoch}!{'.'.join(map(str, parts))}")
