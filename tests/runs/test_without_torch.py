"""A dry run and `plugins doctor` on a machine without torch and transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENV = '''\
from rollouts import Message, Task, ToolCall, reward, tool


class MyEnv:
    """Multiply."""

    def tasks(self, split, rng):
        return [Task(f"What is {a} * {b}?", answer=a * b) for a in range(10) for b in range(10)]

    @tool
    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    @reward
    def correct(self, task, trajectory):
        return float(trajectory.last_text == str(task.answer)) + trajectory.metrics["tool_calls"]

    def demonstrations(self, split, rng):
        call = ToolCall("multiply", {"a": 3, "b": 4}, "c1")
        yield [Message("user", "What is 3 * 4?"), Message("assistant", "", [call]),
               Message("tool", "12", tool_call_id="c1", name="multiply"), Message("assistant", "12")]


class Raising(MyEnv):
    @reward
    def broken(self, task):
        return 1 / 0
'''

WITHOUT = """\
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "tokenizers", "safetensors", "numpy"), None))
from rollouts.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def without_torch(tmp_path):
    (tmp_path / "my_env.py").write_text(ENV)

    def command(*arguments):
        typed = [sys.executable, "-c", WITHOUT, *arguments]
        return subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, check=False)

    return command


INSTALL = ["pip install 'rollouts-rl[train]'", "pip install torch --index-url https://download.pytorch.org/whl/cpu"]


@pytest.mark.parametrize(
    "more",
    [
        ["--filter", "nonzero_std", "--shaping", "overlong", "--kl", "rk3_loss"],
        ["--mode", "sft+rl", "--optimizer", "adafactor", "--training", "fsdp"],
        ["--mode", "eval"],
    ],
)
def test_a_dry_run_checks_what_it_can(without_torch, more):
    done = without_torch("run", "--env", "./my_env.py:MyEnv", "--dry-run", *more)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "call: multiply(a=1, b=1)\n  answer: '1'" in text
    assert "a demonstration, replayed: 4 messages, completed" in text and "reward: 2 (correct 2)" in text
    assert "ok, but not everything: torch and transformers are not installed, so the model" in text
    assert [line for line in INSTALL if line not in text] == []
    assert "everything was checked" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env", "./my_env.py:Raising"], "line 28: return 1 / 0"),
        (["--env", "./my_env.py:MyEnv", "--env.digits", "3"], "has no setting 'digits'"),
    ],
)
def test_a_mistake_is_still_a_mistake(without_torch, arguments, words):
    done = without_torch("run", "--dry-run", *arguments)
    assert done.returncode == 2 and words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_says_how_to_install_torch(without_torch):
    done = without_torch("run", "--env", "./my_env.py:MyEnv", "--out", "out")
    assert done.returncode == 2 and "does not import" in done.stderr
    assert [line for line in INSTALL if line not in done.stderr] == []


def test_the_doctor_lists_what_lacks_torch_apart_from_faults(without_torch):
    done = without_torch("plugins", "doctor")
    assert done.returncode == 0, done.stdout
    found = done.stdout.splitlines()
    assert found[0].startswith("torch is not installed; only these need it: training backend fsdp, training backend")
    assert found[-1].endswith(": all well") and INSTALL[0] in found[1] and INSTALL[1] in found[2]
