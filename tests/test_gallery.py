"""The gallery is that of the packages: current, with one line and one command for every component."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import types
from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.errors import UserError
from rollouts.plugins.index import KINDS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`(rollouts (?:run|eval) [^`]*)` \|$", PAGE, re.MULTILINE)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(ROOT / "scripts" / "gallery.py"))


def test_the_page_is_current(script):
    assert script["gallery"]() == PAGE, "type: python scripts/gallery.py > docs/gallery.md"


def test_every_component_has_a_line_and_a_command(script):
    script["gallery"]()
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \| (.*?) \| `(.*?)` \|$", PAGE, re.MULTILINE)
    listed = {(kind, name) for kind, name, _, _ in rows}
    expected = {
        (kind, name)
        for package in script["packages"]()
        for kind in KINDS
        for name in package.entry_points.get(f"rollouts.{kind}", {})
    }
    assert listed == expected and ("environments", "calculator") in listed
    assert [name for _, name, about, _ in rows if not about] == []


def test_every_package_with_dynamic_names_has_a_pack(script):
    """Another package with hooks that list components gets a table in scripts/gallery_packs.toml."""
    with_hooks = set()
    for package in script["packages"]():
        for module in package.entry_points.get("rollouts", {}).values():
            source = package.folder / f"{module.replace('.', '/')}.py"
            if "rollouts_list_components" in source.read_text(encoding="utf-8"):
                with_hooks.add(package.name)
    assert {pack["package"] for pack in script["packs"]()} == with_hooks
    assert all(example.startswith(pack["prefix"]) for pack in script["packs"]() for example in pack["examples"])


# Only read: what they choose needs an upstream package, a program, a server, or a loss of your own.
PACKS = "gym|gem|reasoning_gym|textarena|textarena_self|verifiers|verifiers-v0"
ELSEWHERE = re.compile(
    rf" ({PACKS})/| --(sandbox|worker|logger|tool|env.url) | --env browser_form| --loss ./my_loss| \./my-reward-model"
)


def test_the_page_for_environments_that_you_have_names_every_adapter(script, monkeypatch, capsys):
    """A row for each plugin with environments, whose commands can be read."""
    page = (ROOT / "docs" / "which-environments.md").read_text(encoding="utf-8")
    plugins = [package for package in script["packages"]() if package.folder.parent.name == "plugins"]
    names = [pack["prefix"] for pack in script["packs"]() if pack["prefix"] != "textarena_self/"]
    names += [f"--env {name} " for each in plugins for name in each.entry_points.get("rollouts.environments", {})]
    table = page.partition("\n## ")[0]
    assert len(names) > 8 and [name for name in names if name not in table] == []
    seen = []
    composed = types.ModuleType("rollouts.runs")
    composed.run = lambda resolved, observer: seen.append(resolved)
    composed.__path__ = [str(ROOT / "rollouts" / "runs")]
    monkeypatch.setitem(sys.modules, "rollouts.runs", composed)
    commands = re.findall(r"\| `(rollouts run [^`]*) --dry-run` \|", table)
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, command + capsys.readouterr().err
    assert len(seen) == len(commands) > 8


@pytest.mark.slow
def test_the_commands_are_read_and_compose(monkeypatch, tmp_path, capsys):
    """Their names, flags and settings are right; no model loads, and nothing runs."""
    from rollouts.runs.plan import make_plan

    seen = []
    composed = types.ModuleType("rollouts.runs")
    composed.run = lambda resolved, observer: seen.append(resolved)
    composed.__path__ = [str(ROOT / "rollouts" / "runs")]
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 20)
    assert len(COMMANDS) > 80
    for command in COMMANDS:
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "rollouts.runs", composed)
            assert main(shlex.split(command)[1:]) == 0, command + capsys.readouterr().err
        if not ELSEWHERE.search(command):
            try:
                make_plan(seen[-1])
            except UserError as error:
                pytest.fail(f"{command}\n{error}")
    assert len(seen) == len(COMMANDS)
