"""Environments with one mistake each: exactly the expected check finds it. Environments without one pass."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import forks
import msgspec
import pytest
from rollouts_check.api import Options, check
from rollouts_check.environments.subject import Found, make_subject
from rollouts_check.environments.table import CHECKS
from rollouts_check.report import Report, Result
from rollouts_check.runner import Check, run_checks

from rollouts.env.shared import shared_values

FAULTS = Path(__file__).parent / "faults"
FILES = sorted(path for path in FAULTS.glob("*__*.py") if "__in_worker_" not in path.name)
SLOW = {"imports", "wheel", "same-seed", "other-process"}  # they start processes
CAUSES = {
    "cancelled__catches_asyncio_cancellation": r"method caught .* define \(.*, line 14: .*let asyncio.Cancelled",
    "other_process__hash_of_a_text": r"builtins.hash gave the hash .*, line 14: return .* use nothing that",
    "other_process__keeps_the_first_task": "an episode left something that a later one sees",
    "repeatable__operating_system": r"posix.urandom gave random numbers of the operating system \(.*, line 16: return",
    "repeatable__remembers_in_the_class": r"the class attribute \w+\.\w+ was .* an episode left something that a later",
    "repeatable__uses_up_what_is_shared": "an episode left something that a later one sees",
    "rewards__asks_for_the_clock": r"time.monotonic gave the clock .* and ask for no clock",
    "other_process__weekday": r"datetime.now gave the clock \(.*, line 16: return .* no clock",
    "repeatable__keeps_every_trajectory": r"the class attribute Fault.seen had .* items",
    "same_seed__date_of_today": r"date.today gave the clock \(.*, line 13: return first",
    "same_seed__shuffles_a_list_of_the_module": r"the module variable NUMBERS was .* copy it first",
    "same_seed__clock": r"prompt was 'At .*datetime.now gave the clock \(.*same_seed__clock.py, line 13: self.now",
}
"""What the report says of the cause."""

LEAVES = {"cancelled", "deadlines", "tool-arguments"}


def nightly(*row):
    return pytest.param(*row, marks=pytest.mark.nightly)


def check_of(file: Path) -> str:
    """The check that finds the fault in the file."""
    return file.stem.partition("__")[0].replace("_", "-")


CHEAP = {
    "answer-hidden": "in_the_prompt",
    "cancelled": "folder_is_left",
    "echo": "earned_by_the_prompt",
    "forged-files": "score_in_a_file",
    "tool-arguments": "writes_outside",
}
"""The fault of a check that the ordinary run takes, if it is not the first one."""

FIRST = {check_of(file): file for file in reversed(FILES)}
FIRST |= {name: FAULTS / f"{name.replace('-', '_')}__{fault}.py" for name, fault in CHEAP.items()}


def failures_alone(file: Path, wanted: str, scratch: Path) -> list[Result]:
    """The failure of one check, without the checks that it needs, but for `definition`."""
    found = Found(f"{file}:Fault", f"{file}:Fault")
    own = {each.name: Check(each.function) for each in CHECKS if each.name in ("definition", wanted)}
    with shared_values():
        subject = make_subject(found, {}, scratch, tasks=2)
        return [each for each in run_checks(list(own.values()), subject) if each.status == "failed"]


def report_of(file: Path, name: str, *, wanted: str = "", **options):
    given = f"{file}:{name}"
    return check(Found(given, given), Options(**{"skip": SLOW - {wanted}, "tasks": 2, **options}))


def in_process_of_its_own(file: Path, wanted: str, only: str = "") -> list[Result]:
    """The failed checks of a fault that leaves threads: other tests count them."""
    skipped = [f"--skip={name}" for name in (SLOW | {"masks", "tool-schemas"}) - {wanted}]  # they import transformers
    chosen = [f"--only={only}"] if only else skipped
    command = [sys.executable, "-m", "rollouts", "check", f"{file}:Fault", *chosen, "--tasks=2", "--json"]
    done = forks.run(command, timeout=300)
    assert done.returncode == 1, done.stderr
    (report,) = msgspec.json.decode(done.stdout, type=list[Report])
    return report.failed


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A temporary folder beside the faults, which may lie in a clone there. One fault takes over Ctrl-C."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def test_there_are_enough_faults():
    assert len(FILES) >= 15
    assert sum(path.name.startswith(("forged", "answer_hidden")) for path in FILES) >= 5


def explained(result: Result, file: Path) -> bool:
    """Whether a failure says what was tried, seen and is to be changed, and the cause that is known."""
    is_whole = bool(result.tried and result.seen and result.change)
    return is_whole and re.search(CAUSES.get(file.stem, ""), f"{result.seen} {result.change}") is not None


@pytest.mark.parametrize("wanted", sorted(set(FIRST) - LEAVES | {"tool-arguments"}))
def test_each_check_finds_a_fault(wanted, place, tmp_path):
    failed = failures_alone(FIRST[wanted], wanted, tmp_path)
    assert [result.name for result in failed] == [wanted]
    assert explained(failed[0], FIRST[wanted])


@pytest.mark.parametrize("wanted", [pytest.param("cancelled", marks=pytest.mark.slow), "deadlines"])
def test_each_check_finds_what_leaves_threads(wanted):
    failed = in_process_of_its_own(FIRST[wanted], wanted, only=wanted)
    assert [result.name for result in failed] == [wanted]
    assert explained(failed[0], FIRST[wanted])


USUAL = "no_op__earned_by_silence"
"""The fault that the ordinary run gives to all checks."""

CASES = [pytest.param(file, id=file.stem, marks=() if file.stem == USUAL else pytest.mark.nightly) for file in FILES]


@pytest.mark.parametrize("file", CASES)
def test_exactly_the_expected_check_finds_a_fault(file, place):
    wanted = check_of(file)
    failed = in_process_of_its_own(file, wanted) if wanted in LEAVES else report_of(file, "Fault", wanted=wanted).failed
    assert [result.name for result in failed] == [wanted], "\n".join(map(str, failed))
    assert explained(failed[0], file)


@pytest.mark.parametrize(
    "wanted", ["other-process", "", *(nightly(name) for name in ("imports", "same-seed", "wheel"))]
)
def test_an_environment_without_a_mistake_passes(wanted):
    report = report_of(FAULTS / "sums.py", "Sums", **({"skip": (), "only": {wanted}} if wanted else {}))
    assert report.failed == []
    skipped = {result.name for result in report.results if result.status == "skipped"}
    assert skipped <= {"forged-files", "wheel"}


@pytest.mark.parametrize(
    ("file", "name", "only"),
    [
        nightly("choice", "Choice", ()),  # parts of a score are no second judgment
        nightly("seeds", "Seeds", ()),  # equal tasks whose ids say which game it is
        nightly("waits", "Waits", ()),  # waiting in a thread, or with await
        nightly(
            "hints", "Hints", ()
        ),  # tools with choices, bounds and flags, and codes of something else than the answer
        ("hints", "Hints", ("answer-hidden",)),
    ],
)
def test_an_honest_neighbor_of_a_fault_passes_without_a_note(file, name, only):
    report = report_of(FAULTS / f"{file}.py", name, **({"only": only, "skip": ()} if only else {}))
    assert report.failed == []
    assert [note for result in report.results for note in result.notes] == []


def test_what_only_looks_like_a_mistake_passes_with_a_note():
    report = report_of(FAULTS / "words.py", "Words", only={"tool-arguments"}, skip=())
    assert report.failed == []
    (note,) = [note for result in report.results for note in result.notes]
    assert re.search(r"define raised KeyError: .*words\.py, line \d+: return .* raise a ValueError", note)
    assert report.verdict().endswith(", 1 note")


@pytest.mark.parametrize("turns", [2, 99])
def test_a_reply_that_never_ends_the_episode_gets_a_note(tmp_path, turns):
    reply = f'    def reply(self, trajectory):\n        return "No." if trajectory.turns < {turns} else None\n'
    source = (FAULTS / "words.py").read_text().partition("    @tool\n")
    judge = "    @reward\n    def correct(self, task, trajectory):\n        return float(trajectory.turns == 1)\n"
    (tmp_path / "endless.py").write_text(f"{source[0]}{reply}\n{judge}".replace("reward, tool", "reward"))
    report = report_of(tmp_path / "endless.py", "Words", only={"episode"}, skip=())
    (notes,) = [result.notes for result in report.results if result.name == "episode"]
    if turns == 2:
        assert notes == []
    else:
        (note,) = notes
        assert note.startswith("`reply` never ended the episode; it ended at --max-turns 8. Return None to end it (")
        assert "endless.py, line " in note


@pytest.mark.parametrize(
    ("file", "name", "checked", "words"),
    [
        nightly("seeds", "Numbered", "task-ids", r"\d\d of 1000 evaluation tasks are training tasks with .* equal ids"),
        nightly(
            "hints",
            "Paid",
            "answer-hidden",
            r"define with reveal=True .* 'l is ', .* earns less after it, so it may be",
        ),
        nightly(
            "hints",
            "Coded",
            "answer-hidden",
            r"the answer in base64, .* for '\d+' .*; leave it out, unless the task is",
        ),
        ("haystack", "Haystack", "answer-hidden", r"the answer behind 'e is ' .*, in changing lines; leave it out"),
        (
            "orders",
            "Orders",
            "task-ids",
            r"two tasks without ids have the prompt 'prompt:What do you want\?' and differ",
        ),
    ],
)
def test_what_may_be_meant_passes_with_a_note(file, name, checked, words):
    report = report_of(FAULTS / f"{file}.py", name, only={checked}, skip=())
    assert report.failed == []
    (note,) = [note for result in report.results for note in result.notes]
    assert re.search(words, note), note


@pytest.mark.parametrize(
    "code", ["answer.encode().hex()", nightly("codecs.encode(answer, 'rot13')"), nightly("'-'.join(answer)")]
)
def test_an_answer_in_any_code_is_found(code, tmp_path):
    source = (FAULTS / "answer_hidden__as_codes_of_letters.py").read_text()
    written = '" ".join(str(ord(letter)) for letter in answer)'
    assert written in source
    (tmp_path / "coded.py").write_text(f"import codecs\n{source.replace(written, code)}")
    report = report_of(tmp_path / "coded.py", "Fault", only={"answer-hidden"}, skip=())
    assert [result.tried for result in report.failed] == ["look for codes of the answers in the prompts"]


def test_nearly_every_check_has_a_fault():
    assert {check.name for check in CHECKS} - set(FIRST) == {"wheel"}  # its fault is a package: test_command.py


def test_a_failure_names_the_author_s_line():
    report = report_of(FAULTS / "rewards__raises.py", "Fault", only={"rewards"}, skip=())
    assert re.search(r"Error: .*rewards__raises\.py, line \d+: ", report.failed[0].seen)


def test_a_process_that_does_not_end_is_a_failure_with_a_reason(monkeypatch):
    from rollouts_check.environments import traces

    monkeypatch.setattr(traces, "subprocess", subprocess)  # a new interpreter takes longer than a fork
    monkeypatch.setattr(traces, "CHILD_SECONDS", 0.01)
    seen = "took longer than 0.01 seconds"
    with pytest.raises(traces.FailedError, match=seen):
        traces.ask_child([sys.executable], "draw", {}, {}, None)
