"""`--sandbox`: the run chooses where an environment's commands run, in a training run, a dry run and a conversation."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError, SignatureError
from rollouts.runs.chat import open_chat
from rollouts.runs.plan import make_plan
from rollouts.runs.run_model import model_plan
from rollouts.runs.workers import sandbox_lines

sys.path.insert(0, str(Path(__file__).parent))
from composing import plan, refused

ENV = '''\
from dataclasses import dataclass

from rollouts import Task, reward, tool


@dataclass
class Python:
    """Sums that a program computes."""

    def tasks(self, split, rng):
        for number in range(rng.randrange(50, 60)):
            yield Task(f"What is {number} + 1? ({split})", answer=number + 1)

    def setup(self, task, sandbox):
        self.sandbox = sandbox
        sandbox.write("answer", str(task.answer))

    def tools(self, task):
        return [self.python] if self.sandbox.read("answer") else []

    @tool
    def python(self, code: str) -> str:
        """Run a Python program."""
        return self.sandbox.exec(["python3", "-"], stdin=code).text

    @reward
    def correct(self, trajectory):
        return float(self.sandbox.read("answer").decode() in trajectory.last_text)
'''

OTHER = '''\
from rollouts.sandboxes import SubprocessSandboxes


class Counted(SubprocessSandboxes):
    """Like `subprocess`, and writes a line for each sandbox.

    Args:
        file: where the lines are written
    """

    words = "counted processes"
    not_stopped = ("everything",)

    def __init__(self, concurrency, *, file: str = "opened"):
        super().__init__()
        self.file = file

    def open(self):
        with open(self.file, "a") as file:
            file.write("opened\\n")
        return super().open()


class Missing(Counted):
    """Not installed."""

    def check(self):
        from rollouts.errors import ConfigError

        raise ConfigError("--sandbox missing: there is no such program\\ntype: apt-get install it")


class Half:
    """No sandbox."""

    def open(self): ...
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    Path("mine.py").write_text(ENV)
    Path("other.py").write_text(OTHER)
    return tmp_path


SMALL = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "eval_tasks": 2, "max_tokens": 96}
FLAGS = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.slow
def test_a_run_of_one_step(here, capsys):
    chosen = ["--sandbox", "./other.py:Counted", "--sandbox.file", "lines"]
    assert main(["run", "--env", "./mine.py:Python", *chosen, *FLAGS, "--out", "run"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "done" and "correct" in summary["evaluation"]["after"]["parts"]
    assert tomllib.loads(Path("run/config.toml").read_text())["sandbox"]["file"] == "lines"
    files = Path("run/trajectories").glob("*.jsonl")
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert len(Path("lines").read_text().splitlines()) == len(lines) > 4  # an episode, a sandbox
    assert all(line["status"] in ("completed", "truncated") for line in lines)
    assert list((here / "temporary").glob("rollouts-sandbox-*")) == []


def test_a_dry_run_opens_one_and_says_what_it_does_not_stop(here, capsys):
    assert main(["run", "--env", "./mine.py:Python", *FLAGS, "--sandbox.memory-gib", "0.5", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^sandbox subprocess: opened, and ran `true`; plain processes in a temporary folder", shown, re.M)
    assert re.search(r"^  it does not stop: reading and writing files outside .*; the network; ", shown, re.M)
    assert "memory_gib = 0.5" in shown and "call: python(code='1')" in shown
    assert list((here / "temporary").glob("rollouts-sandbox-*")) == []


def test_without_an_environment_that_asks_none_is_made(here):
    assert plan(sandbox="./other.py:Missing").environments[0].sandboxes is None
    assert any("--sandbox ./other.py:Missing is not used" in note for note in plan(sandbox="./other.py:Missing").notes)
    assert not any("--sandbox" in note for note in plan().notes)
    assert list(sandbox_lines("subprocess", ())) == []


def test_what_is_wrong_is_said_before_a_model_loads(here):
    refused(ConfigError, "apt-get install it", env="./mine.py:Python", sandbox="./other.py:Missing")
    refused(SignatureError, "has no words, not_stopped, check", env="./mine.py:Python", sandbox="./other.py:Half")
    wrong = {"name": "subprocess", "memory_gib": 0}
    refused(ConfigError, "--sandbox.memory-gib 0.0: expected a number above 0", env="./mine.py:Python", sandbox=wrong)
    wrong = {"name": "subprocess", "memory_gb": 1}
    refused(ConfigError, "did you mean: memory_gib", env="./mine.py:Python", sandbox=wrong)


def test_one_that_fails_in_a_dry_run_is_the_users_mistake(here):
    Path("broken.py").write_text(OTHER.replace("return super().open()", "raise OSError('no room')"))
    made = make_plan(resolve({"env": "./mine.py:Python", "sandbox": "./broken.py:Counted"}))
    with pytest.raises(ConfigError, match=r"--sandbox \./broken\.py:Counted: .*no room"):
        list(sandbox_lines("./broken.py:Counted", made.environments))


def test_a_conversation_about_a_task_has_one(here):
    given = {"env": "./mine.py:Python", "eval_tasks": 2, "max_tokens": 8}
    with model_plan("tiny", given, ("env", "eval_tasks", "max_tokens")) as chat_plan:
        with open_chat(chat_plan, 0, lambda message: None) as chat:
            (folder,) = (here / "temporary").glob("rollouts-sandbox-*")
            chat.begin_anew()
            (second,) = (here / "temporary").glob("rollouts-sandbox-*")
            assert second != folder
    assert list((here / "temporary").glob("rollouts-sandbox-*")) == []


def test_a_class_of_a_file_is_known_as_a_sandbox(here, capsys):
    assert main(["plugins", "show", "./other.py:Counted"]) == 0
    shown = capsys.readouterr().out
    assert "sandbox" in shown and "where the lines are written" in shown
    assert main(["plugins", "show", "subprocess"]) == 0
    assert "--sandbox.ttl-seconds" in capsys.readouterr().out
