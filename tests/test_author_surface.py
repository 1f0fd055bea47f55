"""What an author's code may raise and return: a run goes on, or ends with one clear error; its files can be read."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest
import trio

from rollouts.cli import main
from rollouts.env import tool

sys.path.insert(0, str(Path(__file__).parent))
from agent_fakes import FakeChat, FakeEngine, Quiz, play

RUN = ["--steps", "1", "--prompts-per-step", "1", "--samples-per-prompt", "2", "--max-tokens", "8"]
RUN += ["--eval-tasks", "1"]

PARTS = '''\
import asyncio
import sys

import torch

from rollouts import Task, reward
from rollouts.env import metric, tool
from rollouts.plugins import hookimpl


class Unreadable:
    def __str__(self):
        raise KeyboardInterrupt("no str")

    __repr__ = __str__


class UnreadableError(Exception):
    def __str__(self):
        raise SystemExit(7)


def around():
    inside = {}
    inside["me"] = [inside]
    return inside


def deep(levels=3000):
    value = {}
    for _ in range(levels):
        value = {"in": value}
    return value


class Quiet:
    """Ends after one reply."""

    def tasks(self, split, rng):
        return [Task(f"task {n}", id=f"{split} {n}") for n in range(4)]

    @reward
    def length(self, trajectory):
        return float(len(trajectory.last_text) % 3)


class Unwritable(Quiet):
    """Everything that JSON cannot hold."""

    def tasks(self, split, rng):
        info = {"around": around(), "deep": deep(), "object": Unreadable(), (1, 2): "a tuple", "big": 10**5000}
        return [Task(f"caf\\ud800 {split} {n}", answer=10**5000, info=info) for n in range(4)]

    def setup(self, task):
        self.said = False

    def reply(self, trajectory):
        if self.said:
            return None
        self.said = True
        return "again \\udfff"

    @reward
    def judged(self, trajectory):
        raise ValueError("no \\ud800 number")


def scored(trajectory):
    from rollouts.types import Score

    return Score(float(len(trajectory.last_text) % 3), {"part \\ud800": 1.0}, "why \\ud800")
'''


@pytest.fixture(autouse=True)
def parts(tmp_path, monkeypatch):
    (tmp_path / "authored.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def records(folder):
    return [json.loads(line) for path in sorted(Path(folder, "trajectories").glob("step_*"))
            for line in path.read_text(encoding="utf-8").splitlines()]  # fmt: skip


def test_what_json_cannot_hold_is_replaced_in_the_runs_files_and_a_resume_reads_them(capsys):
    parts = ["--env", "./authored.py:Unwritable", "--reward", "./authored.py:scored", "--reward", "env:1"]
    assert main(["run", *parts, *RUN, "--on-invalid-reward", "zero", "--checkpoint-every", "1", "--out", "out"]) == 0
    assert main(["resume", "out", "--steps", "2"]) == 0, capsys.readouterr().err
    written = records("out")
    for record in written:
        assert record["task"]["answer"] == "<replaced: an integer of 16610 bits>"
        info = record["task"]["info"]
        assert info["around"]["me"] == ["<replaced: the same dict again, which contains itself>"]
        assert "whose str raised" in info["object"] and info["(1, 2)"] == "a tuple"
        assert "nested deeper than 100" in json.dumps(info["deep"])
        assert record["messages"][0]["content"].startswith("caf\\ud800")
        assert "no \\ud800 number" in record["why"]
    assert any(message["content"] == "again \\udfff" for message in written[0]["messages"])


def test_what_is_no_exception_is_an_error_of_the_method_that_raised_it(capsys, parts):
    (parts / "raises.py").write_text(RAISES)
    settings = ["--filter", "./raises.py:keep", "--eval-tasks", "0"]
    assert main(["run", "--env", "./raises.py:Raises", *RUN, *settings, "--out", "out"]) == 0, capsys.readouterr().err
    (first, second) = sorted(records("out"), key=lambda record: record["status"])
    assert (first["status"], second["status"]) == ("completed", "environment_error")
    raised = "RuntimeError: it raised GeneratorExit (raises.py, line 14: raise GeneratorExit)"
    assert second["error"] == f"running setup: {raised}"
    assert first["metrics"]["turns"] == 1.0
    summary = json.loads((parts / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert summary["rollout/metric_failures"] == 0.5


RAISES = """\
import asyncio
import itertools

from authored import Quiet
from rollouts import reward
from rollouts.env import metric


class Raises(Quiet):
    numbers = itertools.count(1)  # its `next` cannot be interrupted: episodes are set up in several threads

    def setup(self, task):
        if next(Raises.numbers) != 2:  # one attempt alone succeeds, in whatever order two rollouts try, and try again
            raise GeneratorExit

    @metric
    def measured(self):
        raise KeyboardInterrupt


def keep(rewards):
    return True


def leaves(rewards):
    raise SystemExit(0)


def interrupts(logprobs):
    raise KeyboardInterrupt


class Late(Quiet):
    def tasks(self, split, rng):
        import time

        yield "the first"
        time.sleep(60)


class Leaves(Quiet):
    def tasks(self, split, rng):
        raise SystemExit(0)


class LeavesLater(Quiet):
    def tasks(self, split, rng):
        yield "the first"
        raise SystemExit


class LeavesAtOnce(Quiet):
    def __init__(self):
        raise SystemExit(0)
"""

WRONG = [
    (["--env", "./raises.py:Leaves"], 2, ["Leaves.tasks", "it called sys.exit(0)"]),
    (["--env", "./raises.py:LeavesLater"], 2, ["LeavesLater.tasks", "it called sys.exit(None)"]),
    (["--env", "./raises.py:LeavesAtOnce"], 2, ["LeavesAtOnce", "it called sys.exit(0)"]),
    (["--env", "./exits.py:Env"], 2, ["exits.py, line 3", "it called sys.exit(0)"]),
    (["--env", "./raises.py:Late", "--tasks-seconds", "0.2"], 2, ["Late.tasks", "0.2 seconds", "--tasks-seconds"]),
    (["--env", "./raises.py:Late", "--tasks-seconds", "0"], 2, ["--tasks-seconds"]),
    (["--env", "./authored.py:Quiet", "--filter", "./raises.py:leaves"], 1, ["filter", "it called sys.exit(0)"]),
    (
        ["--env", "./authored.py:Quiet", "--loss", "./raises.py:interrupts"],
        None,
        ["interrupts", "it raised KeyboardInt"],
    ),
]


@pytest.mark.parametrize(("arguments", "code", "words"), WRONG)
def test_code_that_leaves_the_process_is_one_clear_error(capsys, parts, arguments, code, words):
    (parts / "raises.py").write_text(RAISES)
    (parts / "exits.py").write_text("import sys\n\nsys.exit(0)\n")
    found = main(["run", *RUN, *arguments, "--out", "out"])
    error = capsys.readouterr().err
    assert found in (1, 2) if code is None else found == code, error
    assert error.count("error: ") == 1 and "Traceback" not in error
    for word in words:
        assert word in error, error


def test_a_real_interrupt_passes_an_authors_code():
    """Ctrl-C is a signal: no `raise` statement of the author's made it."""
    from rollouts.author_code import authors_code

    with pytest.raises(KeyboardInterrupt), authors_code():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(RuntimeError, match="it raised KeyboardInterrupt"), authors_code():
        raise KeyboardInterrupt


def test_trios_own_cancellation_passes_and_an_old_one_does_not():
    from rollouts.env import calls

    kept = []

    async def keep():
        try:
            await trio.sleep_forever()
        except trio.Cancelled as error:
            kept.append(error)
            raise

    async def raise_again():
        await trio.lowlevel.checkpoint()
        raise kept[0]

    async def both():
        with trio.move_on_after(0.01) as scope:
            await calls.call(keep, async_library="trio")
        assert scope.cancelled_caught, "trio's own"
        with pytest.raises(RuntimeError, match="it raised Cancelled"):
            await calls.call(raise_again, async_library="trio")

    trio.run(both)


def test_a_name_of_a_megabyte_is_cut_and_a_reply_of_ten_is_not_encoded():
    class Talks(Quiz):
        def reply(self, trajectory):
            return "word " * 2_000_000

    class Counting(FakeChat):
        longest = 0

        def extend(self, before, reply, new, tools, sampled):
            Counting.longest = max(Counting.longest, *(len(message.text) for message in new))
            return super().extend(before, reply, new, tools, sampled)

    engine = FakeEngine("[" + "n" * 1_000_000 + " {}]", context=2_000_000)
    episode = play(Talks, engine, chat=Counting(), max_tokens=1_500_000)
    answer = episode.trajectory.messages[2]
    assert len(answer.text) < 500 and len(answer.name) <= 200, "the tool that does not exist"
    assert (episode.status, Counting.longest) == ("truncated", len(answer.text))
    assert "the model's context holds 2000000" in episode.trajectory.error


@pytest.mark.parametrize("state", ["\ud800", [10**5000], {"at": object()}], ids=["surrogate", "integer", "object"])
def test_a_state_that_a_checkpoint_cannot_hold_is_one_clear_error(state):
    from rollouts.env.methods import plain_state
    from rollouts.errors import EnvironmentDefinitionError

    with pytest.raises(
        EnvironmentDefinitionError, match=r"Chess.state\(\) returned a value that a checkpoint cannot store"
    ):
        plain_state("Chess", [state])


def test_an_asyncio_task_that_leaves_the_process_ends_its_own_tool_only():
    class Tasks(Quiz):
        async def leave(self):
            raise SystemExit(4)

        @tool
        async def begin(self):
            await asyncio.create_task(self.leave())

        @tool
        async def wait(self):
            await asyncio.sleep(0.01)
            return "waited"

    episode = play(Tasks, FakeEngine("[begin {}][wait {}]"))
    answers = [message.text for message in episode.trajectory.messages if message.role == "tool"]
    assert answers == ["Error: RuntimeError: it called sys.exit(4)", "waited"]
