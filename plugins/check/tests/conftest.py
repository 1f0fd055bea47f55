"""These tests have the fixtures and the helpers of `tests`."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rollouts_check.environments import traces

TESTS = Path(__file__).parents[3] / "tests"
sys.path[:0] = [str(Path(__file__).parent), str(TESTS)]  # for `import hash_seeds` and `import forks`
_shared = runpy.run_path(str(TESTS / "conftest.py"))
forget_modules_of_tests, quick_collections = _shared["forget_modules_of_tests"], _shared["quick_collections"]


@pytest.fixture
def forked_checks(monkeypatch):
    """The processes in which `rollouts check` draws and plays start as forks, with their hash seed."""
    import hash_seeds

    monkeypatch.setattr(traces, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": hash_seeds.popen}))
