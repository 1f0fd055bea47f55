"""The version of the contract that a distribution states."""

from __future__ import annotations

import pytest

from rollouts.errors import BrokenPluginError
from rollouts.plugins.index import ComponentRef, find_component
from rollouts.plugins.loading import check_contract, load_component, stated_version
from rollouts.plugins.manager import PluginManager

ENVIRONMENTS = {"rollouts.environments": {"one": "acme_stated:One"}}
REF = ComponentRef("environments", "one", "acme_stated:One", "acme-stated", "3.1")
SOURCE = {"acme_stated": "class One: pass"}


@pytest.mark.parametrize(
    "groups", [{}, {"rollouts.contract": {"version": "1"}}, {"rollouts.contract": {"version": "v1"}}]
)
def test_version_1_runs_and_so_does_a_package_that_states_none(make_distribution, groups):
    make_distribution("acme-stated", ENVIRONMENTS | groups, SOURCE, version="3.1")
    assert load_component(REF).__name__ == "One"
    assert stated_version("acme-stated") == groups.get("rollouts.contract", {}).get("version")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2", ("is written for version 2 of the contract; rollouts", "pip install 'acme-stated!=3.1'")),
        ("v3", ("is written for version 3", "pip install --upgrade rollouts-rl")),
        ("one", ("states the contract version 'one'", 'version = "1"')),
        ("0", ("states the contract version '0'", 'version = "1"')),
    ],
)
def test_another_version_is_refused_before_the_import(make_distribution, version, words):
    groups = ENVIRONMENTS | {"rollouts.contract": {"version": version}}
    make_distribution("acme-stated", groups, {"acme_stated": "raise SystemExit"}, version="3.1")
    with pytest.raises(BrokenPluginError) as caught:
        load_component(REF)
    assert all(each in str(caught.value) for each in ("acme-stated 3.1: its environment 'one'", *words))


def test_components_of_every_kind_are_refused_and_hooks_stop_nothing(make_distribution):
    groups = {"rollouts.rewards": {"one": "acme_stated:One"}, "rollouts": {"acme": "acme_stated"}}
    make_distribution("acme-stated", groups | {"rollouts.contract": {"version": "2"}}, SOURCE, version="3.1")
    with pytest.raises(BrokenPluginError, match=r"acme-stated 3\.1: its reward 'one' is written for version 2"):
        PluginManager().load(find_component("rewards", "one"))
    (fault,) = [each for each in PluginManager().load_hooks() if each.distribution == "acme-stated"]
    assert "its hook plugin 'acme' is written for version 2 of the contract" in fault.cause


def test_a_file_and_the_core_state_nothing(make_distribution):
    make_distribution("rollouts-rl", {"rollouts.contract": {"version": "2"}}, version="9")
    check_contract(ComponentRef("environments", "One", "/x.py:One"))
    check_contract(ComponentRef("losses", "grpo", "rollouts.x:y", "rollouts_rl", "9"))
