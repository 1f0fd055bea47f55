"""Cases of the fuzz of what an author's code may do; scripts/fuzz_author_surface.py has it, and plays 10,000."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "scripts" / "fuzz_author_surface.py"


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz_author_surface", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("count", [150, pytest.param(300, marks=pytest.mark.nightly)])
def test_a_run_ends_as_the_docs_say_whatever_an_authors_code_returns_and_raises(fuzz, tmp_path, count):
    reached = set()
    for number, case in enumerate(fuzz.cases(count, seed=0)):
        try:
            ended = fuzz.play(case, tmp_path / str(number))
        except BaseException as error:  # SystemExit and KeyboardInterrupt are what is looked for
            raise AssertionError(f"case {number}: {case}") from error
        reached.add((case.where, ended == "done"))
    assert {where for where, _ in reached} == set(fuzz.SURFACE)
    assert {where for where, is_done in reached if is_done} >= {*fuzz.EPISODE, "hook", "list_hook"}


def test_the_fuzz_reaches_every_method_of_an_episode(fuzz, tmp_path, monkeypatch):
    for where in fuzz.SURFACE:
        case = fuzz.Case(where, True, 0)
        acted = []
        monkeypatch.setattr(fuzz.Case, "act", lambda self, acted=acted: acted.append(self.where))
        fuzz.play(case, tmp_path / where)
        assert acted == [where] * len(acted) and acted, where


def test_a_demonstration_that_no_file_can_hold_is_a_mistake_of_the_environment(fuzz, tmp_path):
    case = fuzz.Case("demonstrations", raises=False, index=11)
    assert fuzz.play(case, tmp_path / "out") == "EnvironmentDefinitionError"
