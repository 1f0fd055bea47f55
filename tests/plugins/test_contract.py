"""The version of the environment contract that a distribution states."""

from __future__ import annotations

import pytest

from rollouts.errors import BrokenPluginError
from rollouts.plugins.contract import check_contract, stated_version
from rollouts.plugins.index import ComponentRef
from rollouts.plugins.loading import load_component

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
        ("2", ("is written for version 2 of the environment contract", "pip install 'acme-stated!=3.1'")),
        ("v3", ("is written for version 3", "pip install --upgrade rollouts-rl")),
        ("one", ("states the contract version 'one'", 'version = "v1"')),
    ],
)
def test_another_version_is_refused_before_the_import(make_distribution, version, words):
    groups = ENVIRONMENTS | {"rollouts.contract": {"version": version}}
    make_distribution("acme-stated", groups, {"acme_stated": "raise SystemExit"}, version="3.1")
    with pytest.raises(BrokenPluginError) as caught:
        load_component(REF)
    assert all(each in str(caught.value) for each in ("acme-stated 3.1: its environment 'one'", *words))


def test_a_file_and_a_component_of_another_kind_state_nothing(make_distribution):
    groups = {"rollouts.rewards": {"one": "acme_stated:One"}, "rollouts.contract": {"version": "2"}}
    make_distribution("acme-stated", groups, SOURCE, version="3.1")
    assert load_component(REWARD).__name__ == "One"
    check_contract(ComponentRef("environments", "One", "/x.py:One"))


REWARD = ComponentRef("rewards", "one", "acme_stated:One", "acme-stated", "3.1")
