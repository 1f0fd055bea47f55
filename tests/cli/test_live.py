"""The live view: what it shows, and what it survives. The terminals are real ones of this process."""

from __future__ import annotations

import builtins
import contextlib
import re
import sys
import threading
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from terminal import Screen, Terminal

from rollouts.cli import main
from rollouts.errors import ConfigError
from rollouts.inference.base import EngineState
from rollouts.runs import panel as room
from rollouts.runs import progress
from rollouts.runs.observer import GENERATING
from rollouts.runs.panel import Panel, panel_lines
from rollouts.runs.progress import shown_progress
from rollouts.training.rollout_gen.groups import Group
from rollouts.types import Episode, Message, Score, Status, Task, Trajectory

METRICS = {"reward/mean": 0.5, "policy/loss": -0.25, "policy/entropy": 1.0, "perf/gen_tok_s": 1234.0}
HOSTILE = "\x1b[2J\x1b]0;owned\x07 [bold red]x[/] \u202eevil\u2066 \x9b31m \r\b tab\there ⏎ 漢字 👩‍👩‍👧 e\u0301"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def episode(text="4", reward=1.0, role=""):
    task = Task("2 * 2?")
    messages = [*task.messages, Message("assistant", text)]
    trajectory = Trajectory(task, messages, status=Status.COMPLETED)
    return Episode((0, 0), task, [trajectory], Score(reward), {}, role=role)


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def screen(monkeypatch):
    """A terminal, whose size is that of standard output."""
    with Screen() as screen:
        monkeypatch.setattr("rich.console._STD_STREAMS", (screen.stream.fileno(),))
        yield screen


@contextlib.contextmanager
def showing(screen, display="auto", stderr=None):
    """The display of a run whose standard output, and if not given its standard error, is this terminal."""
    with (
        contextlib.redirect_stdout(screen.stream),
        contextlib.redirect_stderr(stderr or screen.stream),
        shown_progress("stdout", display) as shown,
    ):
        yield shown


def train(shown, steps=4, done=None, text="4", says=True):
    """The events of a run. If it `says` nothing, there are no conversations above the view."""
    shown.phase("loading tiny")
    shown.begin("calculator · grpo · tiny", steps, Path("runs/x"), ["a note"])
    shown.engines(lambda: [EngineState("hf", 3, 12)])
    for step in range(steps if done is None else done):
        shown.phase(GENERATING, 0, 2)
        for _ in range(2):
            shown.rollout(episode(text))
        shown.phase("training")
        shown.step(
            step, METRICS | {"reward/mean": step / steps}, [Group(0, Task("?"), (episode(text),))] if says else []
        )
        shown.phase("saving a checkpoint")


def summary(status="done"):
    return {"status": status, "steps": 4, "wall_seconds": 12.0, "cpu_seconds": 9.0,
            "evaluation": {"before": None, "after": None}}  # fmt: skip


# --- what it shows ----------------------------------------------------------------------------------------------------


def panel(**changed):
    now = [0.0]
    made = Panel("calculator · grpo", 10, clock=lambda: now[0])
    made.begin_phase(GENERATING, 3, 8)
    now[0] = 75.0
    for done in (1, 2):
        made.end_step(done, METRICS | {"reward/mean": done / 4})
    made.newest, made.engines = episode("the answer is 4"), [EngineState("hf", 2, 5)]
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def test_it_shows_the_step_the_phase_the_curve_the_engine_and_the_newest_rollout():
    lines = [line.plain for line in panel_lines(panel(), 80)]
    assert lines[0].startswith("── calculator · grpo ───")
    assert re.fullmatch(r"step 2/10 ━{24} 5:00 left", lines[1])
    assert re.fullmatch(r"generating 1:15  3/8 ━{24}", lines[2])
    assert lines[3] == "reward 0.500 ▁█ 0.250 to 0.500"
    assert lines[4] == "loss -0.2500  entropy 1.000  gen tok/s 1234"
    assert lines[5:] == [
        "hf: version 2, 5 in flight",
        "the newest rollout: reward 1.000, completed",
        "  user: 2 * 2?",
        "  assistant: the answer is 4",
    ]


def test_a_bar_is_as_full_as_what_is_done():
    (row,) = [line for line in panel_lines(panel(), 80) if line.plain.startswith("generating")]
    parts = [row.plain[span.start : span.end] for span in row.spans if "━" in row.plain[span.start : span.end]]
    assert parts == ["━" * 9, "━" * 15]


def test_a_low_terminal_has_the_most_important_lines():
    assert [line.plain.split()[0] for line in panel_lines(panel(), 80, height=7)] == ["step", "generating"]
    assert not any("rollout" in line.plain for line in panel_lines(panel(), 80, height=17))


def test_servers_that_do_not_serve_and_many_servers_are_shown():
    engines = [EngineState(f"s{n}", n, n, "loading" if n == 1 else "") for n in range(6)]
    lines = [line.plain for line in panel_lines(panel(engines=engines), 80)]
    shown = ["s0: version 0, 0 in flight", "s1: loading, 1 in flight", "s2: version 2, 2 in flight"]
    assert lines[5:9] == [*shown, "3 more engines: 12 in flight"]


def test_a_run_without_rewards_has_the_curve_of_its_loss():
    made = Panel("t", 4)
    for done, loss in enumerate((2.0, 1.0, float("nan")), start=1):
        made.end_step(done, {"policy/loss": loss})
    assert [line.plain for line in panel_lines(made, 80)][2] == "loss nan █▁  1.000 to 2.000"


@pytest.mark.slow
@given(text=st.text() | st.just(HOSTILE), width=st.integers(1, 200), height=st.integers(1, 50))
def test_no_line_is_too_wide_or_has_what_a_terminal_obeys(text, width, height):
    words = {"title": text, "phase": text, "newest": episode(text, role=text), "words": ""}
    made = panel(**words, engines=[EngineState(text, 1, 1, text)])
    made.metrics = {"reward/mean": 0.5, f"metric/{text}": 1.0}
    for line in panel_lines(made, width, height):
        assert "\n" not in line.plain and not OBEYED.search(line.plain)
        assert cell_len(line.plain) < max(width, 11)


def test_markup_of_a_model_is_text(screen):
    with showing(screen) as shown:
        train(shown, steps=1, text=HOSTILE)
        screen.until("[bold red]x[/]", count=2)  # in the view, and in the conversation
    left = re.sub(r"\x1b\[\??[\d;]*[A-Za-z]", "", screen.text)  # what rich writes itself
    assert not OBEYED.search(left.replace("\r", "")) and r"\x1b]0;owned\x07" in left and r"\u202eevil" in left
    assert "\x1b[2J" not in screen.text


# --- what it survives -------------------------------------------------------------------------------------------------


def frames(text):
    """The lines that were drawn, without commands to the terminal."""
    return [re.sub(r"\x1b\[\??[\d;]*[A-Za-z]|\r", "", line) for line in text.split("\n")]


def assert_clean(screen):
    """The cursor is there, the view is gone, and what follows begins a line."""
    screen.settle()
    text = screen.text
    assert text.count("\x1b[?25l") == 0 or text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert not any(line.startswith(("── ", "generating", "hf: ")) for line in screen.shown())


def test_a_run_leaves_its_lines_and_no_view(screen):
    with showing(screen) as shown:
        train(shown)
        screen.until("step 4/4")
        shown.end(summary())
    assert_clean(screen)
    lines = screen.shown()
    assert lines[:3] == ["calculator · grpo · tiny", "writing to runs/x", "note: a note"]
    assert lines[-2:] == ["reward 0.750 ▁▃▆█ 0.000 to 0.750 over 4 steps", "4 steps in 12 s (9 s of CPU) · runs/x"]
    assert not any(line.startswith("step ") for line in lines)


@pytest.mark.parametrize("columns", [40, 20])
def test_narrow_terminals(screen, columns):
    screen.resize(columns, 40)
    with showing(screen) as shown:
        train(shown, text="a long reply " * 40, says=False)
        text = screen.until("step 4/4")
    drawn = text[text.rindex("step 4/4") :]
    assert all(cell_len(line) <= columns for line in frames(drawn))
    assert_clean(screen)


def test_a_terminal_that_is_made_narrower(screen):
    with showing(screen) as shown:
        train(shown, done=2, text="a long reply " * 40, says=False)
        wide = screen.until("step 2/4")
        assert max(cell_len(line) for line in frames(wide)) > 90
        screen.resize(40, 20)
        shown.step(2, METRICS, [])
        text = screen.until("step 3/4")
        assert all(cell_len(line) <= 40 for line in frames(text[text.rindex("step 3/4") :]))
    assert_clean(screen)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_fails_or_is_interrupted(screen, error, begun):
    with pytest.raises(error), showing(screen) as shown:
        shown.phase("loading tiny")
        if begun:
            train(shown, done=1)
        screen.until("\x1b[?25l")
        raise error
    print("interrupted after 1 of 4 steps", file=screen.stream)
    screen.until("interrupted after")
    assert_clean(screen)
    assert screen.shown()[-1] == "interrupted after 1 of 4 steps"


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(screen, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with showing(screen) as shown:
        train(shown)
        shown.end(summary())
    screen.until("9 s of CPU")
    assert "\x1b" not in screen.text and "step 1/4  reward 0.000" in screen.text


def test_without_colors(screen, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    with showing(screen) as shown:
        train(shown)
        screen.until("step 4/4")
    assert not re.search(r"\x1b\[(?:\d;)*(?:3|4|9|10)\d", screen.text) and "\x1b[?25l" in screen.text


def test_a_terminal_that_is_closed_ends_nothing(screen):
    with showing(screen) as shown:
        train(shown, done=2)
        screen.until("step 2/4")
        screen.hang_up()
        for step in (2, 3):
            shown.step(step, METRICS, [])
        shown.end(summary())


def test_other_output_and_warnings_scroll_above_it(screen):
    with showing(screen) as shown:
        train(shown, done=2)
        print("a logger: [red] 12")
        print("a warning of a library", file=sys.stderr)
        shown.note("a note of the run")
        train(shown, done=3)
        screen.until("step 3/4")
    screen.settle()
    lines = screen.shown()
    for words in ("a logger: [red] 12", "a warning of a library", "note: a note of the run"):
        assert sum(words in line for line in lines) == 1
    assert_clean(screen)


def test_standard_error_stays_where_it_goes(screen, tmp_path):
    with (tmp_path / "err.txt").open("w") as file, showing(screen, stderr=file) as shown:
        train(shown, done=1)
        print("for the file", file=sys.stderr)
    assert (tmp_path / "err.txt").read_text() == "for the file\n" and "for the file" not in screen.text


def test_two_phases_of_a_run(screen):
    with showing(screen) as shown:
        for phase in ("supervised", "reinforcement"):
            shown.phase("loading tiny")
            shown.begin(phase, 4, Path(f"runs/x/{phase}"), [])
            for step in range(4):
                shown.step(step, {"policy/loss": 1.0} if phase == "supervised" else METRICS, [])
            screen.until("loss 1.000" if phase == "supervised" else "reward 0.500")
            shown.end(summary())
    assert_clean(screen)
    assert [line for line in screen.shown() if " over 4 steps" in line] == [
        "loss 1.000 ▁▁▁▁ 1.000 to 1.000 over 4 steps",
        "reward 0.500 ▁▁▁▁ 0.500 to 0.500 over 4 steps",
    ]


def test_an_evaluation(screen):
    with showing(screen) as shown:
        shown.begin("an evaluation", 3, Path("runs/e"), [])
        shown.phase("playing episodes")
        for done in (1, 2):
            shown.rollout(episode())
            shown.episode(done, 0.25)
        screen.until("reward 0.250 so far, the quickest episodes first")
        screen.until("episode 2/3")
    assert_clean(screen)


def test_a_mistake_in_drawing_ends_nothing(screen, monkeypatch):
    def breaks(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(progress, "panel_lines", breaks)
    with showing(screen) as shown:
        train(shown)
        screen.until("this view cannot be drawn: ZeroDivisionError")
        shown.end(summary())
    screen.until("4 steps in 12 s")


def test_nothing_is_left_behind(screen):
    before, stdout = set(threading.enumerate()), sys.stdout
    with showing(screen) as shown:
        train(shown)
        screen.until("step 4/4")
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) <= before and sys.stdout is stdout


# --- which display ----------------------------------------------------------------------------------------------------


def test_lines_in_a_terminal(screen):
    with showing(screen, "lines") as shown:
        train(shown)
    screen.until("step 4/4  reward 0.750")
    assert "\x1b" not in screen.text


def test_nothing():
    with shown_progress("stdout", "none") as shown:
        assert shown is None


@pytest.mark.parametrize("variable", ["", "FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_pipe_gets_lines(capsys, monkeypatch, variable):
    if variable:
        monkeypatch.setenv(variable, "1")
    with shown_progress("stdout") as shown:
        train(shown)
    text = capsys.readouterr().out
    assert "step 4/4  reward 0.750" in text and "\x1b[?25l" not in text


def test_a_live_view_needs_a_terminal(capsys):
    with (
        pytest.raises(ConfigError, match="--display live: standard output is no terminal"),
        shown_progress("stdout", "live"),
    ):
        pass
    assert main(["run", "--env", "calculator", "--display", "live"]) == 2
    assert capsys.readouterr().err.endswith("type: --display lines\n")
    assert main(["run", "--env", "calculator", "--display", "movie"]) == 2
    assert "'movie' is not one of 'auto', 'live', 'lines', 'none'" in capsys.readouterr().err


def test_a_long_wait_before_the_first_step_gets_a_word(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN", 0.01)
    said = threading.Event()
    with shown_progress("stdout") as shown:
        say = shown._say
        monkeypatch.setattr(shown, "_say", lambda words: (say(words), said.set()))
        shown.phase("loading a large model")
        assert said.wait(30)
        monkeypatch.setattr(progress, "SECONDS_BETWEEN", 30.0)
        shown.phase("starting the engine")
        shown.phase("generating")
    assert capsys.readouterr().out == "loading a large model ...\n", "a short wait gets none"


# --- notebooks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def notebook(monkeypatch):
    """What a kernel of Jupyter has: the pages that are shown and changed."""
    pages = []
    shell = type("ZMQInteractiveShell", (), {"__module__": "ipykernel.zmqshell"})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr(room, "NOTEBOOK_SECONDS", 0.01)
    handle = types.SimpleNamespace(update=lambda page: pages.append(("changed", page)))
    display = lambda page, display_id: pages.append(("new", page)) or handle  # noqa: E731
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(HTML=str, display=display))
    return pages


def test_a_notebook_has_one_output_for_the_view_and_lines(notebook, capsys):
    with shown_progress("stderr") as shown:
        train(shown, text=f"<script>{HOSTILE}")
        shown.end(summary())
    kinds = [kind for kind, _ in notebook]
    assert kinds.count("new") == 1 and kinds[0] == "new"
    last = notebook[-1][1]
    assert last.startswith("<pre") and "step 4/4" in last and "reward 0.750" in last
    assert "&lt;script&gt;" in last and "<script>" not in last and not OBEYED.search(last.replace("\n", ""))
    printed = capsys.readouterr()
    assert "note: a note\n" in printed.out and "\x1b" not in printed.out and printed.err == ""
    assert "step 1/4" not in printed.out


def test_a_view_that_does_not_change_is_sent_once():
    pages, over = [], threading.Event()

    def draw(width, height):
        from rich.text import Text

        drawn.append(1)
        if len(drawn) > 20:
            over.set()
        return [Text("the same")]

    drawn: list[int] = []
    shown = room.NotebookScreen(draw, lambda page: pages.append(page) or pages.append)
    original, room.NOTEBOOK_SECONDS = room.NOTEBOOK_SECONDS, 0.001
    try:
        shown.start()
        assert over.wait(30)
    finally:
        shown.stop()
        room.NOTEBOOK_SECONDS = original
    assert len(pages) <= 3, "as it begins, at most one change, and at its end"


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_leaves_a_clean_terminal(tmp_path):
    out = str(tmp_path / "run")
    with Terminal("run", "--env", "calculator", "--steps", "100000", "--eval-tasks", "0", "--out", out) as terminal:
        terminal.until("a rollout of step 1 ")  # a line; the view may leave out any step
        terminal.type("\x03")
        terminal.until("\x1b[?25h")
        terminal.until("interrupted after")
        terminal.until(f"rollouts resume {out}")
        assert terminal.exit_code() == 130


def test_runs_of_several_seeds_and_models_have_the_display_that_was_chosen(tmp_path):
    from rollouts.runs.several import Several

    for command, runs in (("run", {"seed_0": "0"}), ("eval", {"tiny": "tiny"})):
        for display, flags in (("auto", []), ("lines", ["--display=lines"])):
            several = Several(tmp_path, [command], runs, display)
            (name,) = runs
            assert [each for each in several.arguments(name) if "display" in each] == flags
