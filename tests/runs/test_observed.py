"""What a run tells its observer: phases in their order, every rollout, and the engines."""

from __future__ import annotations

import itertools

import pytest

from rollouts.config.resolving import resolve
from rollouts.inference.base import EngineState
from rollouts.runs import run
from rollouts.runs.observer import NullObserver

pytest.importorskip("rollouts_calculator")


class Watching(NullObserver):
    """Keeps the names of events in their order, and looks at the engines when rollouts end."""

    def __init__(self):
        self.events, self.rollouts, self.states, self.progress = [], [], [], []

    def phase(self, name, done=0, total=0):
        self.events.append(name)
        self.progress.append((name, done, total))

    def begin(self, *arguments):
        self.events.append("begin")

    def engines(self, look):
        self.look = look

    def rollout(self, episode):
        self.rollouts.append(episode)
        self.states += self.look()

    def step(self, step, metrics, groups):
        self.events.append(f"step {step}")

    def evaluating(self, when, done, total):
        self.events.append(f"evaluating {when}")
        self.progress.append((when, done, total))

    def episode(self, done, reward_mean):
        self.events.append("episode")


def watched(tmp_path, **changed):
    settings = {"env": "calculator", "steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 16,
                "eval_tasks": 2, "logger": [], "out": str(tmp_path / "run")}  # fmt: skip
    watching = Watching()
    run(resolve({name: value for name, value in (settings | changed).items() if value is not None}), watching)
    return watching


def test_reinforcement(tmp_path):
    seen = watched(tmp_path)
    assert [name for name, _ in itertools.groupby(seen.events)] == [
        "preparing the run", "loading tiny", "begin", "evaluating before", "generating", "training", "step 0",
        "generating", "training", "step 1", "evaluating after", "saving a checkpoint",
    ]  # fmt: skip
    assert ("generating", 0, 4) in seen.progress
    assert [done for when, done, _ in seen.progress if when == "before"] == [0, 1, 2, 3, 4]
    assert len(seen.rollouts) == 8 and all(each.trajectory.messages for each in seen.rollouts)
    assert {state.name for state in seen.states} == {"hf"} and max(state.in_flight for state in seen.states) <= 4
    assert seen.look() == [EngineState("hf", 2, 0)], "two steps were trained, and nothing plays any more"


def test_supervision_and_preparation(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 2?", "response": "4"}\n' * 250)
    seen = watched(tmp_path, mode="sft", env=None, data=str(rows), eval_tasks=0, samples_per_prompt=None)
    assert [done for name, done, _ in seen.progress if name == "preparing rows of data"] == [0, 100, 200]
    order = [name for name, _ in itertools.groupby(seen.events)]
    assert order[-5:] == ["training", "step 0", "training", "step 1", "saving a checkpoint"]


def test_an_evaluation(tmp_path):
    seen = watched(tmp_path, mode="eval", steps=None, prompts_per_step=None, eval_tasks=3)
    order = [name for name, _ in itertools.groupby(seen.events)]
    assert order[:5] == ["preparing the run", "loading tiny", "begin", "starting the engine", "playing episodes"]
    assert set(order[5:]) == {"episode"}
    assert len(seen.rollouts) == 6
