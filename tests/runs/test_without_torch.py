"""The commands on a machine without torch and transformers."""

from __future__ import annotations

import sys

import hash_seeds
import pytest

from rollouts.cli import main
from rollouts.models.loading import TINY_PATH

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
sys.modules.update(dict.fromkeys(ABSENT, None))
from rollouts.cli import main
sys.exit(main())
"""


@pytest.fixture
def without_torch(tmp_path):
    (tmp_path / "my_env.py").write_text(ENV)

    def command(*arguments, absent=("torch", "transformers", "tokenizers", "safetensors", "numpy")):
        typed = [sys.executable, "-c", WITHOUT.replace("ABSENT", repr(absent)), *arguments]
        return hash_seeds.run(typed, cwd=tmp_path, timeout=120)

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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with a checkpoint."""
    folder = tmp_path_factory.mktemp("trained") / "first"
    small = "--steps 1 --prompts-per-step 1 --samples-per-prompt 2 --max-tokens 8 --eval-tasks 2 --concurrency 2"
    assert main(["run", "--env", "calculator", "--out", str(folder), *small.split()]) == 0
    return str(folder)


@pytest.mark.parametrize(
    "typed",
    [
        "eval --env ./my_env.py:MyEnv --out out",
        "eval RUN --out out",
        "eval --env ./my_env.py:MyEnv --model RUN --out out",
        "chat RUN",
        "chat tiny",
        "serve RUN --port 0",
        "serve tiny --port 0",
    ],
)
def test_a_model_is_not_asked_without_torch(without_torch, run, tmp_path, typed):
    done = without_torch(*typed.replace("RUN", run).split())
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(
        "error: the engine hf needs torch and transformers, which are not installed\ntype: pip"
    )
    assert [line for line in [*INSTALL, "--inference openai --inference.url URL"] if line not in done.stderr] == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("typed", ["export RUN out", "export TINY out --dtype bfloat16"])
def test_a_model_is_not_exported_without_torch(without_torch, run, tmp_path, typed):
    done = without_torch(*typed.replace("RUN", run).replace("TINY", str(TINY_PATH)).split())
    assert done.returncode == 2, done.stderr
    assert " needs torch and transformers, which are not installed\ntype: pip" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["my_env.py"]


def test_an_episode_without_a_model_needs_torch_only_for_its_text(without_torch):
    play = ["play", "./my_env.py:MyEnv", "--agent", "scripted"]
    assert without_torch(*play).returncode == 0
    done = without_torch(*play, "--show-text")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: the tokenizer of tiny needs transformers, which is not installed\ntype: pip")


@pytest.mark.slow
def test_each_missing_package_is_named(without_torch):
    """transformers alone reads a tokenizer, which is all that an engine behind a server needs."""
    evaluation = ["eval", "--env", "./my_env.py:MyEnv", "--out", "out"]
    alone = without_torch(*evaluation, absent=("torch",)).stderr
    assert alone.startswith("error: the engine hf needs torch, which is not installed\n")
    behind = without_torch(*evaluation, "--inference", "vllm").stderr
    assert behind.startswith("error: the engine vllm needs transformers, which is not installed\n")
    training = without_torch("run", *evaluation[1:], absent=("transformers", "tokenizers")).stderr
    assert training.startswith("error: the tokenizer of tiny needs transformers, which is not installed\n")


def test_the_doctor_lists_what_lacks_torch_apart_from_faults(without_torch):
    done = without_torch("plugins", "doctor", absent=("torch", "transformers"))
    assert done.returncode == 0, done.stdout
    found = done.stdout.splitlines()
    assert found[0].startswith("torch is not installed; only these need it: training backend fsdp, training backend")
    assert found[-1].endswith(": all well") and INSTALL[0] in found[1] and INSTALL[1] in found[2]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("group_norm", marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("grpo", "rk3_loss")),
    ],
)
def test_checks_that_need_torch_are_left_out_by_name(without_torch, name):
    done = without_torch("check", name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as far as it was tested" in done.stdout and "not tested: values, unchanged" in done.stdout
    assert "type: pip install 'rollouts-rl[train]'" in done.stdout


def test_a_forgotten_import_of_torch_is_a_fault(without_torch, tmp_path):
    (tmp_path / "parts.py").write_text("def keep(rewards) -> bool:\n    return bool(torch.tensor(rewards).any())\n")
    done = without_torch("check", "./parts.py:keep", "--kind", "filter")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NameError: name 'torch' is not defined" in done.stdout
