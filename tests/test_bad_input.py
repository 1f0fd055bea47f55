"""Bad input: one clear error on stderr, the right exit code, no traceback, nothing half-written. The mistakes of the
first hours are in test_mistakes.py; here are those that take parts, models or signals of their own."""

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

from rollouts.cli import main

SMALL = ["--prompts-per-step", "2", "--samples-per-prompt", "4", "--eval-tasks", "4", "--max-tokens", "16"]

PARTS = '''\
import itertools
import math
import time

import torch

from rollouts import Task, reward
from rollouts.inference.base import Capabilities
from rollouts.inference.embedded.hf import HFInference, create_hf_inference
from rollouts.training.backends.torch import TorchBackend, create_torch_backend


class Nothing:
    def tasks(self, split, rng):
        return []

    @reward
    def right(self, task):
        return 1.0


class NothingToTrain(Nothing):
    def tasks(self, split, rng):
        return ["a", "b"] if split == "eval" else ["a"]


class Slow(Nothing):
    def tasks(self, split, rng):
        return [str(n) for n in range(100)]

    @reward
    def slow(self, task):
        time.sleep(0.2)
        return 1.0


calls = itertools.count()


def nan_later(trajectory):
    """Two evaluation passes of 4 tasks, then 8 rollouts a step: NaN in the third step."""
    return math.nan if next(calls) >= 8 + 2 * 8 else float(len(trajectory.last_text) % 2)


def sometimes(trajectory):
    return None if len(trajectory.last_text) % 2 else 1.0


def nan_loss(logprobs, advantages):
    return logprobs * torch.nan


def short_loss(logprobs, advantages, step):
    return -(logprobs * advantages)[1 if step else 0 :]


class ChatOnly:
    capabilities = Capabilities(trainable=False)
    context_tokens_max, vocabulary_size, version = 100, 0, 0

    async def __aenter__(self): ...
    async def __aexit__(self, *exc): ...
    def open_session(self, order): ...
    def close_session(self, session): ...
    async def generate(self, request): ...
    async def score(self, tokens, temperature=1.0): ...
    async def update_weights(self, update): ...
    async def health(self): ...


class Forgetful(ChatOnly):
    capabilities = Capabilities(aborts=True)
    vocabulary_size = property(lambda self: self.nothing)  # as if it were not there
    health = property(lambda self: self.nothing)


def chat_only(model):
    return ChatOnly()


def forgetful(model):
    return Forgetful()


def broken_kl(logprobs, ref_logprobs):
    return [][len(logprobs)]


class BreakingTrainer(TorchBackend):
    def optim_step(self):
        raise KeyError("no optimizer")


def breaking_trainer(model, seed, steps, lr, lora_rank, tokens_per_microbatch, algorithms, auxiliary_models):
    backend = create_torch_backend(**locals())
    backend.__class__ = BreakingTrainer
    return backend


class BreakingEngine(HFInference):
    async def update_weights(self, update):
        raise KeyError("no update")


def breaking_engine(model, training, seed):
    engine = create_hf_inference(**locals())
    engine.__class__ = BreakingEngine
    return engine


def broken_filter(rewards):
    return rewards[99]


def broken_advantage(rewards):
    raise ZeroDivisionError("no advantage today")


class BadLogger:
    """Logs two steps, then the disk is full."""

    in_step = True

    def __init__(self, folder):
        self.left = 2

    def log(self, metrics, step):
        self.left -= 1
        if self.left < 0:
            raise OSError("disk full")

    def close(self):
        raise OSError("cannot close")


class NoLogger:
    def __init__(self, folder):
        from rollouts.errors import UserError

        raise UserError("the tracker is not installed; type `pip install tracker`")
'''


@pytest.fixture(autouse=True)
def parts(tmp_path, monkeypatch):
    """The parts lie beside the run, as `./parts.py:name`."""
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refuse(capsys, code, *arguments, command="run"):
    """The message of a command that must fail with this code."""
    assert main([command, *arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("error: ") == 1, error
    assert "Traceback" not in error
    return error


def refuse_early(capsys, *arguments, command="run"):
    """As above, and nothing was written."""
    before = sorted(Path.cwd().rglob("*"))
    error = refuse(capsys, 2, *arguments, command=command)
    written = [path for path in sorted(Path.cwd().rglob("*")) if path not in before and "__pycache__" not in str(path)]
    assert written == []
    return error


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


# --- before the run -------------------------------------------------------------------------------------------------

RUN = ["--env", "calculator", "--out", "out"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env", "./parts.py:Nothing"], ["no training task", "gave nothing"]),
        (["--inference", "./parts.py:chat_only"], ["chat_only", "evaluation only", "--inference hf"]),
        (
            ["--inference", "./parts.py:forgetful"],
            ["forgetful", "no vocabulary_size", "no health", "no abort", "InferenceBackend", "docs/inference.md"],
        ),
        (["--env", "./parts.py:NothingToTrain"], ["only held-out tasks", "--eval-tasks"]),
        (["--logger", "./parts.py:NoLogger"], ["not installed", "pip install tracker"]),
    ],
)
def test_before_the_run(capsys, arguments, words):
    error = refuse_early(capsys, *RUN, *SMALL, *arguments)
    for word in words:
        assert word in error, error


def save_model(folder, template):
    """The tiny model with another chat template."""
    from rollouts.models.loading import load_hf_model, load_tokenizer, no_progress_bars

    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    with no_progress_bars():
        load_hf_model("tiny").save_pretrained(folder)


def test_a_model_without_a_chat_template(capsys):
    save_model("bare", None)
    error = refuse_early(capsys, *RUN, "--model", "./bare", *SMALL)
    assert "chat template" in error and "bare" in error


def test_a_model_whose_template_shows_no_tools(capsys):
    save_model(
        "plain",
        "{% for m in messages %}<{{ m.role }}>{{ m.content }} {% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
    )
    error = refuse_early(capsys, *RUN, "--model", "./plain", *SMALL)
    assert "has tools" in error and "--model tiny" in error


@pytest.mark.parametrize("out", [[], ["--out", "out"]])
def test_a_dry_run_meets_the_same_errors_and_writes_nothing(capsys, out):
    assert "gave nothing" in refuse_early(capsys, "--env", "./parts.py:Nothing", "--dry-run", *out)
    assert main(["run", "--env", "calculator", "--dry-run", *out]) == 0
    assert "ok: everything was checked; no model was loaded, " in capsys.readouterr().out
    assert [path.name for path in Path.cwd().iterdir() if path.name != "__pycache__"] == ["parts.py"]


# --- in the middle of it --------------------------------------------------------------------------------------------


def test_a_reward_that_returns_nan(capsys, parts):
    arguments = [*RUN, *SMALL, "--steps", "5", "--reward", "./parts.py:nan_later"]
    error = refuse(capsys, 1, *arguments)
    assert (
        "reward 'nan_later' returned nan" in error
        and "2 of 5 steps" in error
        and error.endswith("; correct the cause, then go on with: rollouts resume out\n")
    )
    folder = parts / "out"
    assert {"config.toml", "manifest.json", "metrics.jsonl", "summary.json"} <= {p.name for p in folder.iterdir()}
    assert [line["step"] for line in lines_of(folder)] == [0, 1]
    summary = summary_of(folder)
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert summary["error"].startswith("RewardError: reward 'nan_later' returned nan")
    assert summary["evaluation"]["before"]["tasks"] == 4 and summary["evaluation"]["after"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--loss", "./parts.py:nan_loss"], ["the loss nan_loss", "NaN"]),
        (["--loss", "./parts.py:short_loss"], ["the loss short_loss", "shape"]),
        (["--filter", "./parts.py:broken_filter"], ["the filter broken_filter raised IndexError", "parts.py, line"]),
        (
            ["--advantage", "./parts.py:broken_advantage"],
            [
                "broken_advantage raised ZeroDivisionError",
                ': raise ZeroDivisionError("no advantage today")',
                "errors.log",
            ],
        ),
        (["--on-invalid-reward", "raise", "--reward", "./parts.py:sometimes"], ["'sometimes'", "could not judge"]),
        (["--logger", "./parts.py:BadLogger"], ["the logger", "BadLogger", "disk full"]),
        (["--kl", "./parts.py:broken_kl"], ["the KL estimator broken_kl raised IndexError", "parts.py, line"]),
        (
            ["--training", "./parts.py:breaking_trainer"],
            [
                "the training backend ./parts.py:breaking_trainer failed: KeyError: 'no optimizer'",
                ': raise KeyError("no optimizer")',
                "errors.log",
                "correct the cause, then go on with: rollouts resume out",
            ],
        ),
        (
            ["--inference", "./parts.py:breaking_engine"],
            ["the inference backend ./parts.py:breaking_engine failed: KeyError: 'no update'", "after 0 of 3 steps"],
        ),
    ],
)
def test_in_the_middle(capsys, parts, arguments, words):
    error = refuse(capsys, 1, *RUN, *SMALL, "--eval-tasks", "0", "--steps", "3", *arguments)
    for word in words:
        assert word in error, error
    assert summary_of(parts / "out")["status"] == "failed"


def test_a_logger_that_cannot_close_hides_no_error(capsys, parts):
    refuse(capsys, 1, *RUN, *SMALL, "--steps", "3", "--logger", "./parts.py:BadLogger")
    (fault,) = summary_of(parts / "out")["faults"]
    assert "cannot close" in fault


def test_a_logger_that_cannot_close_fails_no_run(capsys, parts):
    assert main(["run", *RUN, *SMALL, "--steps", "1", "--logger", "./parts.py:BadLogger", "--logger", "jsonl"]) == 0
    assert "cannot close" in capsys.readouterr().out
    assert summary_of(parts / "out")["status"] == "done"
    assert len(lines_of(parts / "out")) == 1


@pytest.mark.parametrize("policy", ["drop", "zero"])
def test_a_reward_that_judges_some_rollouts_only(capsys, parts, policy):
    arguments = [*RUN, *SMALL, "--steps", "2", "--reward", "./parts.py:sometimes", "--on-invalid-reward", policy]
    assert main(["run", *arguments]) == 0
    records = [
        json.loads(line)
        for path in sorted((parts / "out" / "trajectories").glob("step_*"))
        for line in path.read_text().splitlines()
    ]
    unjudged = [record for record in records if record["parts"]["sometimes"] is None]
    assert unjudged and len(unjudged) < len(records)
    assert {record["reward"] for record in unjudged} == {None if policy == "drop" else 0.0}
    assert {record["reward"] for record in records if record not in unjudged} == {1.0}
    for record in unjudged:
        if policy == "drop":
            assert not record["advantage"], "what was not judged is not trained"
        assert "could not judge: it returned None" in record["why"]
    for line, step in zip(lines_of(parts / "out"), (records[:8], records[8:]), strict=True):
        values = [record["reward"] for record in step if record["reward"] is not None]
        assert line.get("reward/mean") == (pytest.approx(sum(values) / len(values)) if values else None)


# --- from outside ---------------------------------------------------------------------------------------------------


def start(folder, *arguments):
    """The command in a process of its own."""
    return forks.popen(
        [sys.executable, "-m", "rollouts", "run", "--env", "calculator", "--out", folder, *SMALL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for_lines(process, folder, count=1):
    """Until metrics.jsonl has that many lines."""
    path = Path(folder) / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run takes too long"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), *(pytest.param(*each, marks=pytest.mark.nightly) for each in [(2, 130), (1, 129)])],
)
def test_a_signal_ends_training_with_a_summary(parts, number, code):
    process = start("out", "--steps", "100000")
    try:
        wait_for_lines(process, "out", 2)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, error
    assert "Traceback" not in error
    summary = summary_of(parts / "out")
    assert summary["status"] == "interrupted" and summary["steps"] >= 2
    logged = len(lines_of(parts / "out"))
    assert summary["steps"] - logged in (0, 1)  # what is saved is what is logged
    last = f"the steps since the last checkpoint (checkpoints/step_{logged:06d}) are not saved; "
    lost = last if summary["steps"] > logged else ""
    again = "go on with: rollouts resume out"
    assert error.strip() == f"interrupted after {summary['steps']} of 100000 steps; {lost}{again}"


@pytest.mark.slow
def test_control_c_while_a_reward_works(parts):
    """In a worker thread: the run does not wait for it to end by itself."""
    process = start("out", "--steps", "100000", "--env", "./parts.py:Slow", "--eval-tasks", "0")
    try:
        wait_for_lines(process, "out")
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert summary_of(parts / "out")["status"] == "interrupted"


@pytest.mark.slow
def test_kill(parts):
    process = start("out", "--steps", "100000")
    try:
        wait_for_lines(process, "out", 3)
    finally:
        process.kill()
    process.communicate()
    folder = parts / "out"
    *whole, _ = (folder / "metrics.jsonl").read_text().split("\n")
    assert [json.loads(line)["step"] for line in whole] == list(range(len(whole)))
    assert json.loads((folder / "manifest.json").read_text())["seed"] == 0
    assert not (folder / "summary.json").exists()
    again = start("again", str(folder / "config.toml"), "--steps", "1")
    _, error = again.communicate(timeout=90)
    assert again.returncode == 0, error
    assert lines_of(parts / "again")[0]["reward/mean"] == lines_of(folder)[0]["reward/mean"]
