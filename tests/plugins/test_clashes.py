"""Environments whose packages clash: what `rollouts plugins doctor` says, and what a failed import says."""

from __future__ import annotations

import msgspec
import pytest
from rollouts_check.clashes import find_clashes

from rollouts.cli import main
from rollouts.env.installing import Install, python_of
from rollouts.errors import BrokenPluginError
from rollouts.plugins.manager import PluginManager

ENVIRONMENT = """
class Env:
    def tasks(self, split, rng):
        yield "?"
"""


@pytest.fixture(autouse=True)
def no_installs(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLOUTS_ENVS", str(tmp_path / "envs"))
    return tmp_path / "envs"


@pytest.fixture
def package(make_distribution):
    def make(name, *requires):
        module = name.replace("-", "_")
        points = {"rollouts.environments": {f"{name}-game": f"{module}:Env"}}
        return make_distribution(name, points, {module: ENVIRONMENT}, requires=requires)

    return make


def lines_about(name: str, lines: list[str]) -> list[str]:
    return [line for line in lines if name in line]


def test_the_doctor_names_what_the_running_python_does_not_meet(package, make_distribution, capsys):
    make_distribution("lib-q", {}, version="2.0.0")
    package("old-q", "Lib_Q[web] (<2)", "gone-q>=1", "lib-q>=1", "lib-q")
    package("fine-q", "lib-q>=2", "lib-q-other; extra == 'all'", "gone-r; python_version < '3'")
    assert main(["plugins", "doctor"]) == 1
    out = capsys.readouterr().out.splitlines()
    way_out = "type: rollouts env install old-q, then --worker venv"
    label = "environment old-q-game (old-q)"
    assert f"{label} requires lib-q<2,>=1, but lib-q 2.0.0 is installed; {way_out}" in out
    assert f"{label} requires gone-q>=1, but gone-q is not installed; {way_out}" in out
    assert len(lines_about("-q", out)) == 2 and not lines_about("gone-r", out)


def test_environments_that_agree_are_no_fault(package, make_distribution):
    make_distribution("lib-q", {}, version="1.5")
    package("a-q", "lib-q>=1,<2")
    package("b-q", "lib-q~=1.4")
    found = find_clashes()
    assert not lines_about("-q", [*found.faults, *found.remarks])


def test_a_clash_of_an_environment_with_its_own_packages_is_no_fault(package, make_distribution, no_installs, capsys):
    make_distribution("lib-q", {}, version="2.0.0")
    package("away-q", "lib-q<2")
    venv = no_installs / "away-q" / "venv-1"
    python_of(venv).parent.mkdir(parents=True)
    python_of(venv).touch()
    install = Install("away-q", "1.0", ["away-game"], "away-q", "3.11", "0.1", "venv-1", 1)
    (no_installs / "away-q" / "install.json").write_bytes(msgspec.json.encode(install))
    found = find_clashes()
    (line,) = lines_about("away-q", found.remarks)
    assert line == (
        "environment away-q-game (away-q) requires lib-q<2, but lib-q 2.0.0 is installed; "
        "away-q has a virtual environment of its own: --worker venv"
    )
    assert not lines_about("-q", found.faults)
    main(["plugins", "doctor"])
    assert line in capsys.readouterr().out.splitlines()


def test_a_failed_import_offers_packages_of_its_own(make_distribution):
    points = {"rollouts.environments": {"torn": "torn_q:Env"}, "rollouts.rewards": {"torn_reward": "torn_q:f"}}
    make_distribution("torn-q", points, {"torn_q": "from json import a_name_that_json_lacks\n"})
    manager = PluginManager()
    with pytest.raises(BrokenPluginError) as caught:
        manager.load(manager.find("environments", "torn"))
    hint = "if it needs other versions of packages, type: rollouts env install torn-q, then --worker venv"
    assert str(caught.value).splitlines()[-1] == hint
    with pytest.raises(BrokenPluginError) as caught:
        manager.load(manager.find("rewards", "torn_reward"))
    assert "--worker" not in str(caught.value)
