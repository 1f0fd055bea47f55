"""The documentation holds: examples run, settings resolve, commands parse, tables are those of the code."""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
import sys
import tomllib
import types
from pathlib import Path
from typing import NamedTuple

import pytest

from rollouts.chat import preflight
from rollouts.cli import main
from rollouts.config.resolving import resolve
from rollouts.plugins import KINDS, VOCABULARY, hookspecs
from rollouts.training.algorithms.aggregation import AGGREGATIONS
from rollouts.training.algorithms.algorithm import ADVANTAGE_AVAILABLE, AVAILABLE

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Block(NamedTuple):
    """A fenced block: where it begins, what stands behind the three backticks, and what is in it."""

    page: Path
    line: int
    info: list[str]
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    start, info, lines = 0, [], []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.startswith("```"):
            lines.append(line)
        elif start:
            found.append(Block(page, start, info, "\n".join(lines) + "\n"))
            start = 0
        else:
            start, info, lines = number, line[3:].split(), []
    assert not start, f"{page.name}: the block that begins on line {start} does not end"
    return found


def section_of(page: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    match = re.search(rf"^#+ {re.escape(title)}$\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"docs/{page} has no heading {title!r}"
    return match[1]


def rows_of(section: str) -> dict[str, str]:
    """The first table of a section: the name in its first column, and its second column."""
    rows = re.findall(r"^\| `([^`|]+)` \| (.*?) \|", section, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a name stands twice"
    return dict(rows)


def commands_of(block: Block) -> list[str]:
    """The `rollouts ...` lines of a shell block, continued lines joined, comments and prompts removed."""
    lines = block.text.replace("\\\n", " ").splitlines()
    stripped = (line.strip().removeprefix("$ ") for line in lines)
    return [part.strip() for line in stripped for part in line.split("&&") if part.strip().startswith("rollouts ")]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.info[:1] == ["python"] and "no-run" not in block.info]
TOML = [block for block in BLOCKS if block.info[:1] == ["toml"]]
COMMANDS = [
    pytest.param(command, id=f"{block}-{number}")
    for block in BLOCKS
    if block.info[:1] in (["bash"], ["console"], ["sh"])
    for number, command in enumerate(commands_of(block))
]


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("rollouts_docs_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    code = compile("\n" * block.line + block.text, str(block.page), "exec")
    exec(code, module.__dict__)


@pytest.mark.parametrize("block", TOML, ids=str)
def test_toml_parses(block):
    tree = tomllib.loads(block.text)
    if "settings" in block.info:
        resolve(tree)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command, tmp_path, monkeypatch, capsys):
    """`run` and `sft` are read to the end, and what they would run is not; of the others the command must exist."""
    seen = []
    composed = types.ModuleType("rollouts.compose")
    composed.run_command = lambda resolved, dry_run: seen.append(resolved) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rollouts.compose", composed)
    monkeypatch.chdir(tmp_path)
    argv = shlex.split(command.partition(" #")[0].partition(" > ")[0])[1:]
    if argv[0] in ("run", "sft"):
        for file in (argument for argument in argv[1:] if argument.endswith(".toml")):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "configs" / "calculator_tiny.toml", file)
        is_help = "--help" in argv
        assert main(argv) == 0, capsys.readouterr().err
        assert is_help or len(seen) == 1
    else:
        assert main([*argv, "--help"]) == 0, capsys.readouterr().err


def test_a_wrong_command_would_be_seen(tmp_path, monkeypatch, capsys):
    for command in ("rollouts run --no-such-flag 3", "rollouts plugins lost", "rollouts run --steps many"):
        with pytest.raises(AssertionError, match="error: "):
            test_commands_parse(command, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


def test_pages_say_no_machine_s_paths():
    for page in PAGES:
        found = re.findall(r"(?:/work/|/root/|/home/|/tmp/)\S*", page.read_text(encoding="utf-8"))
        assert found == [], f"{page.name}: {found}"


@pytest.mark.parametrize("kind", VOCABULARY)
def test_the_vocabulary_is_the_code_s(kind):
    assert rows_of(section_of("plugins.md", kind)) == VOCABULARY[kind]


@pytest.mark.parametrize(("kind", "available"), [("losses", AVAILABLE), ("advantages", ADVANTAGE_AVAILABLE)])
def test_what_a_run_can_give_now_is_marked(kind, available):
    marks = dict(re.findall(r"^\| `([^`|]+)` \| .*? \| (yes|no) \|$", section_of("plugins.md", kind), re.MULTILINE))
    assert marks == {name: "yes" if name in available else "no" for name in VOCABULARY[kind]}


def test_every_kind_is_documented():
    assert list(rows_of(section_of("plugins.md", "Kinds"))) == list(KINDS)


def test_every_hook_is_documented_with_its_signature():
    hooks = [name for name in hookspecs.__all__ if name.startswith("rollouts_")]
    section = section_of("plugins.md", "Hooks")
    for name in hooks:
        signature = str(inspect.signature(getattr(hookspecs, name))).replace("'", "")
        assert f"def {name}{signature}: ..." in section
        assert f"- `{name}`: " in section


def test_what_a_loss_may_name_now():
    documented = rows_of(section_of("losses.md", "What a loss may name"))
    assert set(documented) == AVAILABLE
    assert set(documented) <= set(VOCABULARY["losses"])


def test_every_aggregation_is_documented():
    assert set(rows_of(section_of("losses.md", "Aggregations"))) == set(AGGREGATIONS)


def test_the_documented_environment_is_the_tested_one():
    """The one that tests/packages runs for real; it has at most 25 lines."""
    source = (ROOT / "tests" / "packages" / "sources" / "my_env.py").read_text()
    assert source in [block.text for block in blocks_of(ROOT / "docs" / "environments.md")]
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 25


def test_the_words_of_the_preflight_are_the_code_s():
    source = inspect.getsource(preflight.TemplateReport.words)
    phrases = re.findall(r"^\| ((?:The|No|A) .*?) \|", section_of("chat.md", "Preflight"), re.MULTILINE)
    assert len(phrases) == source.count("lines.append(") + source.count("lines += [")
    assert [phrase for phrase in phrases if phrase not in source] == []


def test_core_components_are_documented():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(points["rollouts.losses"]) == set(rows_of(section_of("losses.md", "An algorithm")))
    assert set(points["rollouts.filters"]) == set(rows_of(section_of("filters.md", "The core's own")))
    for name in points["rollouts.advantages"]:
        assert f"`{name}`" in section_of("losses.md", "Advantages")
