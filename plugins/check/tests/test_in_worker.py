"""`rollouts check --worker`: environments that behave otherwise in a worker, and one that does not."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from made_wheels import write_wheel
from rollouts_check.api import Options, check, find
from rollouts_check.environments.subject import Found
from rollouts_check.environments.table import CHECKS, IN_WORKER

from rollouts.cli import main
from rollouts.errors import ConfigError

FAULTS = Path(__file__).parent / "faults"
FILES = sorted(FAULTS.glob("*__in_worker_*.py"))
PROCESS = {"worker": {"kind": "process"}}


def wanted_of(file: Path) -> str:
    return file.stem.partition("__")[0].replace("_", "-")


def cases():
    """Nightly has all checks of each fault, and the faults whose check finds one without a worker too."""
    known = {check.name for check in CHECKS}
    for file, is_alone in itertools.product(FILES, (True, False)):
        is_more = not is_alone or wanted_of(file) in known
        marks = [pytest.mark.nightly] if is_more else []
        marks += [pytest.mark.slow] if wanted_of(file) == "worker-lives" else []  # it waits for the end of a worker
        yield pytest.param(file, is_alone, id=f"{file.stem}-{is_alone}", marks=marks)


@pytest.mark.parametrize(("file", "is_alone"), list(cases()))
def test_exactly_the_expected_check_finds_a_fault_in_a_worker(file, is_alone):
    name, wanted = f"{file}:Fault", wanted_of(file)
    needed = {"cancelled"} if wanted == "worker-lives" else set()  # the worker dies when an episode is cancelled
    only = {wanted, *needed} if is_alone else ()
    report = check(Found(name, name), Options(only=only, tasks=2, settings=PROCESS))
    assert [each.name for each in report.failed] == [wanted], report.failed
    assert report.failed[0].tried and report.failed[0].seen and report.failed[0].change


def test_every_check_of_workers_has_a_fault():
    found = set(map(wanted_of, FILES))
    assert {each.name for each in IN_WORKER} - {each.name for each in CHECKS} <= found
    names = [each.name for each in IN_WORKER]
    assert all(set(each.needs) <= set(names) - {each.name} for each in IN_WORKER)


def test_the_page_has_every_check_of_workers_with_its_docstring():
    text = (Path(__file__).parents[3] / "docs" / "check.md").read_text(encoding="utf-8")
    section = text.partition("## In a worker\n")[2].partition("\n## ")[0]
    own = [each for each in IN_WORKER if each.name not in {known.name for known in CHECKS}]
    assert re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", section, re.MULTILINE) == [(each.name, each.doc) for each in own]
    assert all(f"`{each.name}`" in section for each in IN_WORKER)


def test_an_environment_without_a_mistake_passes_in_a_worker(capsys):
    assert main(["check", f"{FAULTS / 'sums.py'}:Sums", "--worker", "process", "--tasks", "2"]) == 0
    out = capsys.readouterr().out
    assert "in a worker keeps the contract: 15 passed" in out and "worker-lives" in out


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        ("ws://127.0.0.1:9", "type, on that host: rollouts env serve"),
        ("venv", "type: rollouts env install"),
        ("thread", "with a kind of: inline, process, venv"),
    ],
)
def test_a_worker_that_cannot_be_used_is_one_error(worker, words, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUTS_ENVS", str(tmp_path))
    assert main(["check", "calculator", "--worker", worker]) == 2
    assert words in capsys.readouterr().err


def test_a_check_of_the_other_table_is_unknown():
    with pytest.raises(ConfigError, match="there is no check of this name"):
        find("calculator", Options(only=["wheel"], settings=PROCESS))


PYPROJECT = """\
[project]
name = "sums"
version = "1"

[project.entry-points."rollouts.environments"]
sums = "sums_here:Sums"
"""


@pytest.mark.nightly
def test_an_environment_in_a_virtual_environment_passes(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUTS_ENVS", str(tmp_path / "envs"))
    code = (FAULTS / "sums.py").read_text(encoding="utf-8")
    wheel = write_wheel(tmp_path, "sums", "1", code, ["rollouts-rl"], "[rollouts.environments]\nsums = sums:Sums\n")
    assert main(["env", "install", str(wheel), "--no-index"]) == 0
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "sums_here.py").write_text(code)
    for given in (
        "sums",
        str(tmp_path),
    ):  # the folder of a package is its environment, under the name that is installed
        capsys.readouterr()
        assert main(["check", given, "--worker", "venv", "--tasks", "2"]) == 0, capsys.readouterr().err
        out = capsys.readouterr().out
        assert re.search(r"oracle +passed", out) and re.search(r"worker-lives +passed", out)


@pytest.mark.nightly
def test_an_environment_at_an_address_passes(capsys):
    name = f"{FAULTS / 'sums.py'}:Sums"
    command = [sys.executable, "-m", "rollouts", "env", "serve", name, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().partition(" at ")[2].split()[0]
            assert main(["check", name, "--worker", url, "--tasks", "2"]) == 0
        finally:
            server.terminate()
    assert "in a worker keeps the contract: 15 passed" in capsys.readouterr().out
