"""The budget of CPU counts a test's own work and its processes', and excludes what several tests share."""

from __future__ import annotations

import cpu_budget

TESTS = """\
import subprocess, sys, time
import cpu_budget, pytest

LOOP = "import time\\nwhile time.process_time() < 0.3: pass"

def work():
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass

@pytest.fixture(scope="session")
def shared():
    work()

@pytest.fixture
def own():
    work()

def test_work(): work()
def test_fixture(own): pass
def test_process(): subprocess.run([sys.executable, "-S", "-c", LOOP])
def test_nothing(): pass
def test_shared(shared): pass
def test_excluded():
    with cpu_budget.excluded():
        work()
@pytest.mark.slow
def test_slow(): work()
"""


def test_who_uses_more_fails(pytester, monkeypatch):
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers = slow")
    with monkeypatch.context() as patch:
        patch.setattr(cpu_budget, "SECONDS_MAX", 0.15)
        patch.setattr(cpu_budget, "TOLERANCE", 1.0)
        patch.setattr(cpu_budget, "LOOP_SECONDS", 100.0)  # no loop is slow
        found = pytester.runpytest_inprocess("-p", "cpu_budget", "-m", "not nightly")
    found.assert_outcomes(passed=4, failed=3)
    said = found.stdout.str()
    advice = "seconds of CPU, and may use 0.15: make it faster, mark it slow, or leave cases to nightly"
    reports = [line for line in said.splitlines() if line.startswith("the test used 0.") and line.endswith(advice)]
    assert len(reports) == 3, said
    # pytest shortens these lines to the width of the terminal, but not where CI is set
    assert all(f"::test_{name} - Failed: the test used 0." in said for name in ("work", "fixture", "process")), said
