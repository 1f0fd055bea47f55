"""A package that is imported is declared, and one that is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

from rollouts.doors import HOMES

ROOT = Path(__file__).parents[1]
FILES = [path for package, home in HOMES.items() for path in (home / package).rglob("*.py")]
NEWER_PYTHON = {"annotationlib"}  # of the standard library from 3.14 on
OF_PYTEST = {"pytest"}  # imported by its plugin, which only pytest imports
OF_A_SERVER = {"vllm"}  # imported inside vLLM's own process alone


def imported() -> set[str]:
    """The roots of all imports of the distribution, at any depth, the standard library's excluded."""
    found: set[str] = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - NEWER_PYTHON - HOMES.keys()


def declared() -> tuple[set[str], set[str]]:
    """The modules of the base dependencies, and of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lists = (project["dependencies"], [*extras["train"], *extras["serve"]])
    base, train = ({re.split(r"[ ><=!~\[;]", each)[0].replace("-", "_") for each in group} for group in lists)
    return base, train


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    base, train = declared()
    assert {"trio", "click"} <= base and "torch" in train
    assert imported() - OF_A_SERVER - OF_PYTEST == base | train
