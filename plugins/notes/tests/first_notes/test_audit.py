"""scripts/audit_first_notes.py calls everything that the notes name, and notices what is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import forks
import pytest

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "scripts" / "audit_first_notes.py"
sys.path.append(str(ROOT / "scripts"))

import audit_first_notes as audit  # noqa: E402
from first_notes.rows import Row, check  # noqa: E402

ROWS = [row for table in audit.NOTES.values() for row in table]


WITH_FORKS = """
import runpy, subprocess, sys
from types import SimpleNamespace

import forks
from rollouts_fsdp import ranks

ranks.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": forks.popen})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def decisions() -> list[str]:
    """The headings below "Where the notes contradict each other", with their text."""
    page = (ROOT / "docs" / "first-notes.md").read_text()
    return page.partition("## Where the notes contradict each other")[2].split("\n### ")[1:]


@pytest.mark.nightly
def test_everything_is_there(tmp_path):
    """In a process of its own, because it reads what other tests may have changed. Its ranks are forks."""
    program = tmp_path / "audit_with_forks.py"
    program.write_text(WITH_FORKS)
    done = forks.run([sys.executable, str(program), str(SCRIPT), "--faults"], timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"301 rows: \d+ there, \d+ exception, 0 needs, 10 later, 0 partly, 0 absent\n", done.stdout)


def test_each_row_is_checked_or_has_a_reason():
    assert len(ROWS) == 301
    assert [row.name for row in ROWS if row.check is None and not row.words] == []
    assert sum(row.check is None for row in ROWS) == 10  # deployment, JAX


def test_each_exception_has_a_decision_with_two_quotes():
    texts = decisions()
    assert {row.exception for row in ROWS if row.exception} <= {text.partition("\n")[0] for text in texts}
    assert 0 < len(texts) <= 10
    for text in texts:
        assert text.count("\n- Note 00") == 2 and "Decision: " in text, text


def imports_nothing():
    from rollouts.training import no_such_name  # noqa: F401


def does_less():
    assert [1] == [2], "one is not two"


@pytest.mark.parametrize(
    ("row", "state", "words"),
    [
        (Row("a", imports_nothing), "absent", "ImportError: cannot import name 'no_such_name'"),
        (Row("a", does_less), "partly", "AssertionError: one is not two"),
        (Row("a", does_less, exception="Two"), "partly", "AssertionError"),
        (Row("a", lambda: None), "there", ""),
        (Row("a", lambda: None, exception="Two"), "exception", "docs/first-notes.md, Two"),
        (Row("a", words="data"), "later", "data"),
        (Row("a", does_less, needs="no-such-package"), "needs", "type: pip install no-such-package"),
    ],
)
def test_states(row, state, words):
    result = check("000", row)
    assert result.state == state and words in result.words


def test_a_fault_is_printed_and_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(audit, "NOTES", {"000": [Row("good", lambda: None), Row("bad", does_less)]})
    assert audit.main(["--faults"]) == 1
    out = capsys.readouterr().out
    assert "bad  partly" in out and "good" not in out
    assert "2 rows: 1 there, 0 exception, 0 needs, 0 later, 1 partly, 0 absent" in out
    monkeypatch.setattr(audit, "NOTES", {"000": [Row("good", lambda: None)]})
    assert audit.main([]) == 0
