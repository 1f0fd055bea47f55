"""Where an author's error came from: its line in messages, its traceback in errors.log."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import trio

from rollouts.author_code import place_of, place_of_function
from rollouts.env import metric, reward, tool
from rollouts.env.authoring import tools_of
from rollouts.env.tools import run_tool
from rollouts.error_log import NOTES_MAX, PLACES_MAX, ErrorLog, is_logging, report
from rollouts.errors import words_of
from rollouts.plugins.loading import import_file
from rollouts.types import Task, ToolCall, Trajectory

sys.path.insert(0, str(Path(__file__).parent))
from agent_fakes import FakeEngine, Quiz, play


def raised(function, *arguments):
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


def module(folder, name, text):
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return import_file(name, str(path))


def test_the_place_is_the_innermost_line_of_the_authors_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    library = module(tmp_path / "site-packages", "zz_library", "def pick(values):\n    return values['key']\n")
    author = module(tmp_path, "zz_author", "def judge(pick):\n    first = 1\n    return pick({})  # here\n")
    assert words_of(raised(author.judge, library.pick)) == (
        "KeyError: 'key' (zz_author.py, line 3: return pick({})  # here)"
    )
    alone = raised(library.pick, {})
    alone.__traceback__ = alone.__traceback__.tb_next  # without this file's lines
    assert place_of(alone).text == "return values['key']", "an installed component is an author too"
    assert words_of(ValueError("never raised")) == "ValueError: never raised"
    exec_error = raised(author.judge, lambda values: exec("1 / 0"))
    assert "test_error_log.py" in str(place_of(exec_error)) and "exec(" in place_of(exec_error).text


def test_the_line_is_named_in_a_folder_that_was_removed(tmp_path, monkeypatch):
    author = module(tmp_path, "zz_moved", "def judge():\n    raise ValueError('moved')\n")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    words = words_of(raised(author.judge))
    assert words == f"ValueError: moved ({tmp_path}/zz_moved.py, line 2: raise ValueError('moved'))"


def test_a_syntax_error_and_a_group_have_their_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    broken = raised(module, tmp_path, "zz_broken", "x = 1\nif x\n")
    assert words_of(broken) == "SyntaxError: expected ':' (zz_broken.py, line 2: if x)"
    source = "errors = [KeyError('a'), *map(ValueError, range(9))]\nraise ExceptionGroup('many', errors)\n"
    words = words_of(raised(module, tmp_path, "zz_many", source))
    assert words.startswith("10 errors: KeyError: 'a' (zz_many.py, line 2: raise ExceptionGroup(")
    assert words.endswith("; 5 more") and words.count("ValueError") == 4


def test_the_place_of_a_function_is_below_its_decorators():
    class Marked:
        @staticmethod
        @tool(
            timeout_seconds=3,
        )
        def add(a: int) -> int:
            """Add."""
            return a

    assert place_of_function(Marked.__dict__["add"]).text == "def add(a: int) -> int:"
    assert place_of_function(len) is None


def test_the_first_error_of_a_line_is_written_and_noted_and_all_are_counted(tmp_path):
    notes = []
    with ErrorLog(tmp_path / "errors.log", notes.append, Path("out/errors.log")):
        for number in range(3):
            error = raised(int, f"x{number}")
            assert report(error, "the reward short").startswith("ValueError: invalid literal")
        assert not (tmp_path / "errors.log").read_text().count("how often")
    text = (tmp_path / "errors.log").read_text()
    assert text.count("Traceback (most recent call last)") == 1 and "function(*arguments)" in text
    assert "       3 x the reward short: ValueError" in text
    (note,) = notes
    assert note.startswith("the reward short failed: ValueError: invalid literal") and note.endswith("out/errors.log")
    assert report(error, "later").startswith("ValueError"), "without a run there are words, and no file"


def test_the_log_is_bounded(tmp_path):
    notes = []
    with ErrorLog(tmp_path / "errors.log", notes.append):
        for number in range(PLACES_MAX + 50):
            report(ValueError(number), f"the metric m{number}")
    assert len(notes) == NOTES_MAX
    text = (tmp_path / "errors.log").read_text()
    assert text.count("=== ") == PLACES_MAX + 2 and "      50 x other errors" in text


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path):
    notes = []
    with ErrorLog(tmp_path / "missing" / "errors.log", notes.append):
        assert report(ValueError("a"), "x") == "ValueError: a"
    assert "cannot be written: No such file" in notes[0]


class Broken(Quiz):
    """Every part of it fails, but the game."""

    def setup(self, task):
        assert task.answer

    @reward
    def few_calls(self, trajectory):
        return 1 / trajectory.metrics["no such count"]

    @metric
    def words(self):
        return "many"

    @metric
    def endless(self):
        return float("nan")

    @tool
    def explode(self):
        """Explode."""
        return {}["fuse"]


def test_an_episode_reports_every_error_of_its_environment_with_its_line(tmp_path):
    notes = []
    with ErrorLog(tmp_path / "errors.log", notes.append):
        episode = play(Broken, FakeEngine("[explode {}]", "42"))
    assert (
        "few_calls could not judge: KeyError: 'no such count' (" in episode.score.why
        and ': return 1 / trajectory.metrics["no such count"])' in episode.score.why
    )
    assert (
        "KeyError: 'fuse'" in episode.trajectory.messages[2].text and "line" not in episode.trajectory.messages[2].text
    )
    said = "\n".join(notes)
    assert "the metric words failed: TypeError: it returned 'many' (str); a metric returns a finite number (" in said
    assert "def words(self):" in said and "the metric endless failed: TypeError: it returned nan (float)" in said
    assert "the tool explode failed: KeyError: 'fuse' (" in said and 'return {}["fuse"]); its traceback is in ' in said
    assert "=== the tool explode: KeyError: 'fuse'" in (tmp_path / "errors.log").read_text()
    assert episode.metrics["metric_failures"] == 2


@pytest.mark.parametrize("replies", [["42"], ['[double {"n": 2}]', "42"], ["[nothing {}]", "42"], []])
def test_the_metrics_of_a_trajectory_have_the_promised_counts(replies):
    episode = play(engine=FakeEngine(*replies) if replies else FakeEngine())
    for trajectory in [*episode.trajectories, Trajectory(Task("x"), [])]:
        assert {"turns", "tool_calls", "tool_failures"} <= set(trajectory.metrics)
    calls = sum(reply.startswith("[") for reply in replies)
    assert episode.trajectory.metrics["tool_calls"] == calls


def test_runs_at_the_same_time_have_their_own_logs(tmp_path):
    """Two threads, each with a run under trio. A thread of no run writes to the log that was opened last."""
    both, done = threading.Barrier(2), threading.Barrier(3)

    async def fail(number):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_task, number)

    async def in_task(number):
        report(raised(int, f"task {number}"), "the reward")

    def run(number):
        with ErrorLog(tmp_path / f"{number}.log", lambda note: None):
            both.wait(10)
            report(raised(int, f"plain {number}"), "the filter")
            trio.run(fail, number)
            done.wait(10)
            done.wait(10)

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    done.wait(10)
    report(raised(int, "elsewhere"), "the tool")
    done.wait(10)
    for thread in threads:
        thread.join(10)
    texts = [(tmp_path / f"{number}.log").read_text() for number in (1, 2)]
    for own, other, text in ((1, 2, texts[0]), (2, 1, texts[1])):
        assert f"'plain {own}'" in text and f"'task {own}'" in text and f" {other}'" not in text
    assert sum("elsewhere" in text for text in texts) == 1
    assert not is_logging()


def test_the_message_of_a_syntax_error_can_be_printed():
    """An author may raise a SyntaxError whose message has half of a surrogate pair."""
    try:
        raise SyntaxError("no \ud800 good")
    except SyntaxError as error:
        assert "no \\ud800 good" in words_of(error).encode().decode()


@pytest.mark.parametrize("error, is_noted", [(ValueError, False), (KeyError, True)])
def test_a_tool_that_refuses_a_call_gets_no_note(tmp_path, error, is_noted):
    class Shop:
        @tool
        def price(self, thing: str) -> str:
            """The price."""
            raise error(thing)

    notes: list[str] = []
    tools = {each.name: each for each in tools_of(Shop())}
    with ErrorLog(tmp_path / "errors.log", notes.append):
        outcome = trio.run(run_tool, tools, ToolCall("price", {"thing": "rum"}))
    assert "rum" in outcome.text and "rum" in (tmp_path / "errors.log").read_text()
    assert bool(notes) is is_noted
