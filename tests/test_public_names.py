"""A package's `__all__` is sorted and complete; every first-party entry point imports and follows the rules."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
import tomllib
from pathlib import Path

import pytest

import rollouts
from rollouts.cli.app import COMMANDS
from rollouts.doors import HOMES, open_module
from rollouts.plugins import KINDS, ComponentRef, check_signature, load_component

ROOT = Path(__file__).parents[1]
WALKED = [each for name in HOMES for each in pkgutil.walk_packages(open_module(name).__path__, f"{name}.")]
PACKAGES = [*HOMES, *sorted(module.name for module in WALKED if module.ispkg)]
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("*/*/pyproject.toml"))]


def entry_points(project: Path) -> list[ComponentRef]:
    about = tomllib.loads(project.read_text())["project"]
    return [
        ComponentRef(group.removeprefix("rollouts."), name, value, about["name"], about["version"])
        for group, points in about.get("entry-points", {}).items()
        if group.startswith("rollouts.") and group != "rollouts.contract"
        for name, value in points.items()
    ]


ENTRY_POINTS = [ref for project in PROJECTS for ref in entry_points(project)]


def sort_key(name: str) -> tuple[int, str]:
    """As ruff sorts (RUF022): constants, classes, the rest."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2, name)


@pytest.mark.parametrize("name", PACKAGES)
def test_what_a_package_offers_is_sorted_and_complete(name):
    """A package whose face has names lists them; a module has no list: what has no underscore is public."""
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None)
    if public is None:
        body = ast.parse(Path(module.__file__).read_text()).body
        assert all(isinstance(node, ast.Expr) for node in body), f"{name} defines things and has no __all__"
        return
    assert list(public) == sorted(set(public), key=sort_key), f"{name}.__all__"
    missing = [each for each in public if not hasattr(module, each)]
    assert missing == []
    assert set(public) <= set(dir(module))


def test_a_name_that_is_not_there():
    for name in ("rollouts", "rollouts.chat", "rollouts.plugins", "rollouts.env", "rollouts.training"):
        module = importlib.import_module(name)
        with pytest.raises(AttributeError, match="no_such_name"):
            getattr(module, "no_such_" + "name")


def test_there_are_entry_points():
    assert {ref.kind for ref in ENTRY_POINTS} <= set(KINDS)
    assert {"calculator", "prompts", "grpo", "hf", "torch", "jsonl"} <= {ref.name for ref in ENTRY_POINTS}


@pytest.mark.parametrize(
    "ref", [ref for ref in ENTRY_POINTS if ref.kind != "commands"], ids=lambda ref: f"{ref.kind}-{ref.name}"
)
def test_entry_points_import_and_follow_the_rules(ref):
    signature = check_signature(load_component(ref), ref.kind, ref.qualified)
    for setting in signature.settings:
        assert setting.doc, f"{ref.qualified}: the setting {setting.name} has no line of documentation"


@pytest.mark.parametrize("ref", ENTRY_POINTS, ids=lambda ref: f"{ref.kind}-{ref.name}")
def test_entry_points_are_installed_as_they_are_written(ref):
    """The metadata of an editable install is that of the day it was made: a new entry point needs a new install."""
    from rollouts.plugins import installed_components

    assert ref.qualified in {each.qualified for each in installed_components(ref.kind)}


def test_the_commands_of_the_metadata_are_those_of_the_help():
    """The help reads no metadata."""
    own = {ref.name: ref.value for ref in entry_points(ROOT / "pyproject.toml") if ref.kind == "commands"}
    assert own == {name: value for name, (value, _) in COMMANDS.items() if not value.startswith("rollouts.")}


def test_on_windows_the_import_says_what_to_type(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="runs on Linux and macOS; on Windows, install it in WSL"):
        importlib.reload(rollouts)
