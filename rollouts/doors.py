"""The packages of this distribution beside `rollouts`, and the door to them.

The core imports none of them. A command (`rollouts.cli.app.COMMANDS`) opens the door with `open_module`. Names
that users import, such as `rollouts.check`, are kept by the lazy faces and by `moved_modules` of `rollouts.lazy`, which
open the door too.

In a wheel, the packages are beside `rollouts`. In a clone, each is in its folder below `plugins`. An installation with
`pip install -e` that is older than the folder does not know it, so the door adds it to `sys.path`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def _home_of(package: str) -> Path:
    in_clone = ROOT / "plugins" / package.removeprefix("rollouts_")
    return in_clone if (in_clone / package).is_dir() else ROOT


BESIDE = ("rollouts_check", "rollouts_fsdp", "rollouts_notes", "rollouts_servers", "rollouts_view")
HOMES = {"rollouts": ROOT} | {package: _home_of(package) for package in BESIDE}
"""Each package of this distribution, and the folder that holds it."""


class MissingPackageError(ImportError):
    """A package of this distribution is missing."""


def open_module(name: str) -> ModuleType:
    """Import a module, of this distribution or of another. Raises MissingPackageError for one of this distribution."""
    package = name.partition(".")[0]
    if package not in sys.modules and package in HOMES:  # it may import another one
        sys.path[:0] = [home for home in dict.fromkeys(map(str, HOMES.values())) if home not in sys.path]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package or package not in HOMES:
            raise
        raise MissingPackageError(
            f"the package {package} of rollouts-rl is missing\n"
            "type: pip install --force-reinstall rollouts-rl; in a clone of rollouts: pip install -e ."
        ) from None
