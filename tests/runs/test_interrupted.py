"""Ctrl-C saves the last finished step, so that a resumed run loses no training and ends as one without it does."""

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
from rollouts.config.resolving import resolve
from rollouts.errors import CheckpointError
from rollouts.runs import run
from rollouts.runs.observer import NullObserver
from rollouts.runs.session import second_interrupt_at_once
from rollouts.training.backends.torch import TorchBackend

SMALL = {
    "steps": 3,
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "eval_tasks": 2,
    "max_tokens": 8,
    "checkpoint_seconds": 0,
}
ENV = '''\
import itertools
import os
import signal
from pathlib import Path

from rollouts_calculator import Calculator as Base

numbers = itertools.count(1)


class Calculator(Base):
    def setup(self, task):
        """The flag says in which episode Ctrl-C comes. Episodes are set up in several threads at once."""
        number = next(numbers)
        if Path("flag").exists() and number == int(Path("flag").read_text()):
            os.kill(os.getpid(), signal.SIGINT)
'''


class Interrupting(NullObserver):
    """Ctrl-C in the training part of a step, which is not logged yet."""

    def __init__(self, at: int) -> None:
        self.at, self.notes = at, list[str]()

    def step(self, step, metrics, groups):
        if step == self.at:
            os.kill(os.getpid(), signal.SIGINT)

    def note(self, words):
        self.notes.append(words)


def losses(folder):
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["policy/loss"]) for line in lines]


def weights(folder):
    return Path(folder, "checkpoints/step_000003/model.safetensors").read_bytes()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mode", ["rl", pytest.param("sft", marks=pytest.mark.nightly)])
def test_a_step_that_trains_is_finished_and_saved(here, mode):
    settings = {"env": "calculator", "mode": mode, **SMALL}
    if mode == "sft":
        del settings["samples_per_prompt"]
    observer = Interrupting(1)
    with pytest.raises(KeyboardInterrupt, match=r"interrupted after 2 of 3 steps; go on with: rollouts resume cut"):
        run(resolve(settings | {"out": "cut"}), observer)
    assert observer.notes == ["interrupted: saving step 2"]
    summary = json.loads(Path("cut/summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["checkpoint"]) == ("interrupted", 2, "checkpoints/step_000002")
    assert json.loads(Path("cut/manifest.json").read_text())["checkpoint"] == "checkpoints/step_000002"
    rollouts.resume("cut")
    assert [path.name for path in Path("cut/checkpoints").iterdir()] == ["step_000003"], "it replaces the saved one"
    rollouts.run(**settings, out="whole")
    assert losses("cut") == losses("whole") and weights("cut") == weights("whole")


def test_sampling_is_cut_short_and_the_step_before_is_saved(here):
    Path("mine.py").write_text(ENV)
    # Two evaluations of two tasks, then four episodes a step: in the third step.
    Path("flag").write_text(str(4 + 8 + 2))
    with pytest.raises(KeyboardInterrupt, match="interrupted after 2 of 3 steps"):
        rollouts.run(env="./mine.py:Calculator", out="cut", **SMALL)
    assert [path.name for path in Path("cut/checkpoints").iterdir()] == ["step_000002"]
    Path("flag").unlink()
    rollouts.resume("cut")
    rollouts.run(env="./mine.py:Calculator", out="whole", **SMALL)
    assert losses("cut") == losses("whole") and weights("cut") == weights("whole")


def test_an_evaluation_between_steps_is_left_out(here):
    Path("mine.py").write_text(ENV)
    Path("flag").write_text(str(4 + 4 + 1))
    with pytest.raises(KeyboardInterrupt, match="interrupted after 1 of 3 steps"):
        rollouts.run(env="./mine.py:Calculator", out="cut", eval_every=1, **SMALL)
    assert [path.name for path in Path("cut/checkpoints").iterdir()] == ["step_000001"]
    assert len(losses("cut")) == 1


def test_nothing_is_saved_where_nothing_was_trained(here):
    Path("mine.py").write_text(ENV)
    Path("flag").write_text("1")
    with pytest.raises(KeyboardInterrupt, match="interrupted after 0 of 3 steps"):
        rollouts.run(env="./mine.py:Calculator", out="cut", **SMALL)
    assert not list(Path("cut/checkpoints").iterdir())


def test_a_checkpoint_that_does_not_fit_is_reported(here, monkeypatch):
    def save(self, path, state=None):
        raise CheckpointError("the disk is full", is_full=True)

    monkeypatch.setattr(TorchBackend, "save", save)
    observer = Interrupting(0)
    with pytest.raises(KeyboardInterrupt, match="interrupted after 1 of 3 steps"):
        run(resolve({"env": "calculator", **SMALL, "out": "cut"}), observer)
    assert observer.notes[-1] == "warning: the checkpoint was not written: the disk is full"


def test_a_second_interrupt_is_never_held():
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with second_interrupt_at_once(None) as interrupts:
            interrupts.is_held = True
            signal.raise_signal(signal.SIGINT)
            assert interrupts.is_asked
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize("gap", [pytest.param(0.02, marks=pytest.mark.nightly), 0.2])
def test_two_quick_interrupts_end_a_run_cleanly(here, gap):
    flags = ["--env", "calculator", "--steps", "100000", "--prompts-per-step", "2", "--samples-per-prompt", "2"]
    flags += ["--eval-tasks", "2", "--max-tokens", "16", "--out", "cut"]
    metrics = Path("cut/metrics.jsonl")
    process = forks.popen([sys.executable, "-m", "rollouts", "run", *flags], stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and not (metrics.exists() and metrics.read_text()):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        time.sleep(gap)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert "Traceback" not in error and "Trio" not in error
    last = error.strip().splitlines()[-1]
    assert last.startswith("interrupted after ") and last.endswith("rollouts resume cut")
    assert ("no checkpoint was written" in last) == (not list(Path("cut/checkpoints").iterdir()))
