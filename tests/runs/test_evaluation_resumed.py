"""An evaluation that is killed at any moment goes on where it was, and has the results of an unbroken one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest

import rollouts
from rollouts.cli import main
from rollouts.errors import ConfigError
from rollouts.runs.jobs.evaluate import PLAYED

TASKS, SAMPLES = 24, 2
SUMS = '''\
import os
from pathlib import Path
import trio
from rollouts import Task, reward

class Sums:
    """Tasks whose answers need half a reply of the model, and a while."""

    def tasks(self, split, rng):
        return [Task(f"{split} {i}: {rng.randint(10, 99)} + {rng.randint(10, 99)}") for i in range(TASKS)]

    async def reply(self, trajectory):
        if trajectory.task.prompt.startswith(os.environ.get("FAILS", "never")):
            raise RuntimeError("out of order")
        await trio.sleep(float(os.environ.get("WAIT", 0)))
        return "again" if trajectory.turns < 2 else None

    @reward
    def even(self, trajectory):
        return float(len(trajectory.last_text) % 2)

def differ(tasks, trajectories):
    """A reward of the whole group: the share of its replies that nobody else gave."""
    texts = [each.last_text for each in trajectories]
    return [float(texts.count(text) == 1) for text in texts]
'''.replace("TASKS", str(2 * TASKS))
FLAGS = ["--env", "./sums.py:Sums", "--reward", "env:1", "--reward", "differ=./sums.py:differ:0.5"]
FLAGS += ["--eval-tasks", str(TASKS), "--samples-per-prompt", str(SAMPLES), "--max-tokens", "6", "--concurrency", "3"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "sums.py").write_text(SUMS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def results(folder: Path):
    """The episodes and the numbers, without what a clock says, and the logprobs of the sampled tokens."""
    lines = [json.loads(line) for line in (folder / "trajectories" / "eval.jsonl").read_text().splitlines()]
    logprobs = [each for line in lines for segment in line["segments"] for each in segment.pop("logprobs")]
    for line in lines:
        line["metrics"] = {name: value for name, value in line["metrics"].items() if "seconds" not in name}
    summary = json.loads((folder / "summary.json").read_text())
    numbers = {name: summary[name] for name in ("status", "reward_mean", "reward_stderr", "parts", "episodes")}
    return lines, numbers, logprobs


def check_equal(one: Path, other: Path) -> None:
    """Episodes and numbers are equal. The last digits of logprobs depend on which episodes share a batch."""
    *first, logprobs = results(one)
    *second, others = results(other)
    assert first == second and logprobs == pytest.approx(others, abs=1e-4)


def played(folder: Path) -> int:
    return (folder / PLAYED).read_bytes().count(b"\n") if (folder / PLAYED).exists() else 0


def kill_after(command: list[str], folder: Path, more: int, how: int) -> int:
    """Run a command until `folder` has so many more episodes, end it with a signal, and return its exit code."""
    before = played(folder)
    slow, words = dict(os.environ, WAIT="0.05"), [sys.executable, "-m", "rollouts", *command]
    process = forks.popen(words, stdout=subprocess.DEVNULL, env=slow)
    deadline = time.monotonic() + 120
    while played(folder) < before + more and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(how)
    return process.wait(60)


@pytest.mark.slow
def test_a_killed_evaluation_equals_an_unbroken_one(here, capsys):
    assert main(["eval", *FLAGS, "--out", "whole"]) == 0
    assert kill_after(["eval", *FLAGS, "--out", "killed"], here / "killed", 7, signal.SIGKILL) == -signal.SIGKILL
    assert kill_after(["resume", "killed"], here / "killed", 6, signal.SIGKILL) == -signal.SIGKILL
    with open(here / "killed" / PLAYED, "ab") as file:
        file.write(b'[[3,0],{"prompt":"cut in the mid')  # as a full disk or a crash leaves it
    assert kill_after(["resume", "killed"], here / "killed", 6, signal.SIGINT) == 130
    kept = played(here / "killed")
    assert 19 <= kept < TASKS * SAMPLES and results(here / "killed")[1]["status"] == "interrupted"
    capsys.readouterr()
    assert main(["resume", "killed"]) == 0
    assert f"going on after {kept} of {TASKS * SAMPLES} episodes" in capsys.readouterr().out
    check_equal(here / "killed", here / "whole")
    assert len((here / "killed" / "metrics.jsonl").read_text().splitlines()) == 1
    assert len(json.loads((here / "killed" / "manifest.json").read_text())["resumed"]) == 3
    assert not (here / "killed" / PLAYED).exists()
    before = {path: path.stat().st_mtime_ns for path in (here / "killed").rglob("*")}
    assert main(["resume", "killed"]) == 0
    assert f"killed is finished: all of its {TASKS * SAMPLES} episodes are played" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (here / "killed").rglob("*")} == before


def test_failed_episodes_are_played_again(here, monkeypatch, capsys):
    few = [*FLAGS, "--eval-tasks", "4", "--max-failures", "9", "--retries", "0"]
    assert main(["eval", *few, "--out", "whole"]) == 0
    lines, *_ = results(here / "whole")
    monkeypatch.setenv("FAILS", lines[0]["task"]["prompt"])
    assert main(["eval", *few, "--out", "failed"]) == 0
    assert results(here / "failed")[1]["episodes"] == 8 and played(here / "failed") == 8
    capsys.readouterr()
    monkeypatch.delenv("FAILS")
    assert main(["resume", "failed"]) == 0
    assert "2 failed episodes are played again" in capsys.readouterr().out
    check_equal(here / "failed", here / "whole")


def test_an_end_before_the_summary_is_written_loses_nothing(here, monkeypatch, capsys):
    few = [*FLAGS, "--eval-tasks", "2"]
    with monkeypatch.context() as patch:
        patch.setattr("rollouts.runs.session.Session.write_summary", killed)
        with pytest.raises(SystemError, match="killed"):
            main(["eval", *few, "--out", "out"])
    assert played(here / "out") == 4 and not (here / "out" / "summary.json").exists()
    capsys.readouterr()
    assert main(["resume", "out"]) == 0
    assert "going on after 4 of 4 episodes" in capsys.readouterr().out
    assert results(here / "out")[1]["status"] == "done" and not played(here / "out")


def killed(*_):
    raise SystemError("killed")


def test_what_a_resumed_evaluation_refuses(here, capsys):
    few = ["--eval-tasks", "3", "--samples-per-prompt", "1"]
    assert kill_after(["eval", *FLAGS, *few, "--out", "out"], here / "out", 1, signal.SIGKILL) == -signal.SIGKILL
    for flags, words in (
        (["--checkpoint", "step_000001"], "holds an evaluation, which writes none"),
        (["--steps", "3"], "an evaluation trains nothing"),
        (["--env.tasks", "3"], "a resumed evaluation keeps its settings"),
    ):
        assert main(["resume", "out", *flags]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(ConfigError, match="temperature: a resumed evaluation keeps its settings"):
        rollouts.resume("out", temperature=0.5, quiet=True)
    (here / "sums.py").write_text(SUMS.replace("rng.randint(10, 99)", "rng.randint(100, 999)", 1))
    assert main(["resume", "out"]) == 2
    assert "of this evaluation is another one now" in capsys.readouterr().err and played(here / "out")


def test_some_tasks_are_played_as_in_the_whole_evaluation(here, capsys):
    assert main(["eval", *FLAGS, "--out", "whole"]) == 0
    assert main(["eval", *FLAGS, "--tasks", "3-5, 0,17", "--out", "some"]) == 0
    assert "5 tasks of 24 × 2" in capsys.readouterr().out
    lines, numbers, _ = results(Path("some"))
    assert [line["group"] for line in lines] == [0, 0, 3, 3, 4, 4, 5, 5, 17, 17] and numbers["episodes"] == 10
    whole = [line for line in results(Path("whole"))[0] if line["group"] in (0, 3, 4, 5, 17)]
    assert lines == whole


def test_one_task_and_resuming_some(here):
    assert main(["eval", *FLAGS, "--tasks", "7", "--out", "one"]) == 0
    summary = json.loads(Path("one/summary.json").read_text())
    assert summary["tasks"] == 1 and summary["episodes"] == 2
    (here / "one" / "summary.json").unlink()
    assert main(["resume", "one"]) == 0
    assert json.loads(Path("one/summary.json").read_text())["episodes"] == 2


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ("24", "there are 24 held-out tasks, from 0 to 23; --eval-tasks holds out more"),
        ("5-3", "from 0 to 23"),
        ("0-99999999999", "no held-out task has this id"),
        ("gsm-1", "no held-out task has this id"),
        (",", "names no task"),
    ],
)
def test_tasks_that_there_are_not(tasks, words, here, capsys):
    for more in ([], ["--dry-run"]):
        assert main(["eval", *FLAGS, "--tasks", tasks, "--out", "out", *more]) == 2
        assert words in capsys.readouterr().err and not Path("out").exists()


def test_training_chooses_no_tasks(capsys):
    assert main(["run", "--env", "calculator", "--tasks", "0-3", "--dry-run"]) == 2
    assert "type: rollouts eval" in capsys.readouterr().err
