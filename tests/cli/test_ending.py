"""How a command ends that did not decide to: by a signal, or with an output that nobody reads any more."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import forks
import pytest

import rollouts
from rollouts.cli import main
from rollouts.cli.ending import interrupted_by_signals

ENVIRONMENT = """\
import os, signal
from rollouts import Task, reward

class Signaled:
    signals: str = ""
    def __init__(self, *, signals: str = ""):
        self.signals = signals
    def tasks(self, split, rng):
        return [Task(f"{split} {i}") for i in range(8)]
    @reward
    def correct(self, task, trajectory):
        print("an author's own line", flush=True)
        if " 5" in str(task.messages[0].content):
            for name in self.signals.split():
                os.kill(os.getpid(), getattr(signal, name))
        return 1.0
"""
WHOLE_COLLECTIONS = True
SMALL = ["--env", "calculator", "--env.digits", "1", "--steps", "2", "--prompts-per-step", "2"]
SMALL += ["--samples-per-prompt", "2", "--eval-tasks", "2", "--max-tokens", "16", "--out", "out"]


class Chat(BaseHTTPRequestHandler):
    """Answers every request with the same words."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = b'{"choices": [{"message": {"content": "46"}, "finish_reason": "stop"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Chat) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture
def evaluation(tmp_path, monkeypatch, url) -> list[str]:
    """The arguments of an evaluation of eight episodes, one at a time, without torch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    flags = ["--env", "./mine.py:Signaled", "--eval-tasks", "8", "--concurrency", "1", "--out", "out"]
    return ["eval", *flags, "--inference", "openai", "--inference.url", url, "--model", "m"]


def summary() -> dict:
    return json.loads(Path("out/summary.json").read_text())


def in_a_shell(before: str, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which a shell starts after `before`."""
    command = ["sh", "-c", f'{before} exec "$@"', "sh", sys.executable, "-m", "rollouts", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# --- signals ----------------------------------------------------------------------------------------------------------


NIGHTLY = pytest.mark.nightly
ENDED = [("SIGTERM", 143), *(pytest.param(*each, marks=NIGHTLY) for each in (("SIGHUP", 129), ("SIGINT", 130)))]


@pytest.mark.parametrize(("name", "code"), ENDED)
def test_a_signal_ends_the_run_with_a_summary(evaluation, name, code):
    done = forks.run([sys.executable, "-m", "rollouts", *evaluation, "--env.signals", name], timeout=60)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "of 8 episodes are done, out keeps them" in done.stderr
    assert summary()["status"] == "interrupted" and summary()["episodes"] in (5, 6)


def test_signals_that_were_ignored_at_the_start_stay_ignored(evaluation):
    """`nohup` ignores SIGHUP; shells ignore SIGINT for what a script starts in the background."""
    done = in_a_shell("trap '' HUP INT;", [*evaluation, "--env.signals", "SIGHUP SIGINT"])
    assert done.returncode == 0, done.stderr
    assert (summary()["status"], summary()["episodes"]) == ("done", 8)


@NIGHTLY
def test_sigterm_ends_what_ignores_the_others(evaluation):
    done = in_a_shell("trap '' HUP INT;", [*evaluation, "--env.signals", "SIGHUP SIGINT SIGTERM"])
    assert done.returncode == 143, done.stderr
    assert summary()["status"] == "interrupted" and summary()["episodes"] in (5, 6)


def test_handlers_are_given_back(capsys):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    assert main(["--version"]) == 0
    assert [signal.getsignal(number) for number in numbers] == before


# --- an output that was closed ----------------------------------------------------------------------------------------


def closed_pipe() -> int:
    """A pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


CLOSED = [("eval", closed_pipe), ("eval", full_disk), pytest.param("run", full_disk, marks=NIGHTLY)]


@pytest.mark.parametrize(("command", "opened"), CLOSED)
def test_a_closed_output_ends_no_run(evaluation, monkeypatch, opened, command):
    if opened is full_disk and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with os.fdopen(opened(), "w") as out, os.fdopen(opened(), "w") as error:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", error)
        code = main(evaluation if command == "eval" else ["run", *SMALL])
        assert (sys.stdout, sys.stderr) == (out, error)
    assert code == 0 and summary()["status"] == "done"


def test_an_output_that_was_never_open_ends_no_run(evaluation):
    done = in_a_shell("exec >&- 2>&-;", evaluation)
    assert done.returncode == 0 and summary()["status"] == "done"


def test_a_terminal_without_the_characters_shows_them_escaped(evaluation, monkeypatch, tmp_path):
    with (tmp_path / "shown").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(evaluation) == 0
    assert "\\xb7 openai" in (tmp_path / "shown").read_text()


def test_a_full_disk_behind_what_a_command_prints_is_one_error(monkeypatch, capfd):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    done = subprocess.run(
        [sys.executable, "-m", "rollouts", "config"], stdout=full_disk(), stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 1 and done.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_child_that_an_environment_forked(number):
    before = signal.signal(number, signal.SIG_DFL)  # the test runner may have a handler of its own
    with interrupted_by_signals() as received, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, b"ready")
                time.sleep(20)
            finally:
                os._exit(3)
        assert os.read(reading, 5) == b"ready"
        os.kill(child, number)
        status = os.waitpid(child, 0)[1]
    signal.signal(number, before)
    os.close(reading)
    os.close(writing)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == number and received == []


# --- garbage collection -----------------------------------------------------------------------------------------------


def test_a_run_gives_back_what_it_excluded_from_collection(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    frozen = []
    monkeypatch.setattr("rollouts.runs.session.freeze_loaded", lambda: (gc.freeze(), frozen.append(True)))
    env = {"name": "calculator", "digits": 1}
    sizes = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "eval_tasks": 0, "max_tokens": 16}
    rollouts.run(env=env, out="a", **sizes)
    assert frozen and gc.get_freeze_count() == 0
    assert main(["run", *SMALL]) == 0
    assert len(frozen) == 2 and gc.get_freeze_count() == 0


def test_an_interrupt_in_the_exit_of_another_one_does_not_hide_its_message():
    """A second Ctrl-C may come as the first is raised, with the message that says how far the run came."""
    from rollouts.cli.app import _known_error

    try:
        try:
            raise KeyboardInterrupt("interrupted after 2 of 4 steps")
        finally:
            raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        assert str(_known_error(error)) == "interrupted after 2 of 4 steps"
