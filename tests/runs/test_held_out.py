"""What a training run shows of its held-out tasks: scores in every logger, episodes in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollouts.cli import main

RUN = ["run", "--env", "calculator", "--prompts-per-step", "1", "--samples-per-prompt", "2", "--eval-tasks", "3"]
RUN += ["--max-tokens", "8"]
TWICE = """\
import json
from pathlib import Path

class Calls:
    def __init__(self, folder):
        self.path = Path(folder) / "calls.jsonl"
    def log(self, metrics, step):
        with self.path.open("a") as file:
            print(json.dumps([step, metrics.get("eval/reward_mean"), "policy/loss" in metrics]), file=file)
    def close(self):
        pass
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_every_logger_gets_the_scores_before_on_the_way_and_after(here):
    (here / "calls.py").write_text(TWICE)
    loggers = ["--logger", "jsonl", "--logger", "./calls.py:Calls"]
    assert main([*RUN, *loggers, "--steps", "4", "--eval-every", "2", "--out", "out"]) == 0
    evaluation = json.loads((here / "out/summary.json").read_text())["evaluation"]
    before, after = (evaluation[when]["reward_mean"] for when in ("before", "after"))
    written = lines("out/metrics.jsonl")
    assert [line["step"] for line in written] == [0, 1, 2, 3]
    assert ["eval/reward_mean" in line for line in written] == [True, True, False, True]
    assert (written[0]["eval/reward_mean"], written[3]["eval/reward_mean"]) == (before, after)
    assert all("policy/loss" in line for line in written)
    on_the_way = written[1]["eval/reward_mean"]
    expected = [[0, before, True], [1, on_the_way, True], [2, None, True], [3, None, True], [3, after, False]]
    assert lines("out/calls.jsonl") == expected


def test_the_evaluated_episodes_are_kept_and_those_of_steps_that_are_taken_again_are_not(here):
    more = ["--eval-every", "1", "--checkpoint-every", "1", "--keep-checkpoints", "9"]
    assert main([*RUN, *more, "--steps", "2", "--out", "out"]) == 0
    folder = here / "out/trajectories"
    names = ["eval_000000.jsonl", "eval_000001.jsonl", "eval_000002.jsonl", "step_000000.jsonl", "step_000001.jsonl"]
    assert sorted(path.name for path in folder.glob("*.jsonl")) == names
    last = (folder / "eval_000002.jsonl").read_text()
    found = lines(folder / "eval_000002.jsonl")
    assert [line["temperature"] for line in found] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    rewards = [line["reward"] for line in found if line["temperature"] == 1.0]
    after = json.loads((here / "out/summary.json").read_text())["evaluation"]["after"]
    assert sum(rewards) / 3 == pytest.approx(after["reward_mean"])
    assert all(line["metrics"]["metric/used_tool"] in (0.0, 1.0) for line in found)
    trained = {line["task"]["prompt"] for line in lines(folder / "step_000000.jsonl")}
    assert trained.isdisjoint(line["task"]["prompt"] for line in found)
    (folder / "eval_000002.jsonl").write_text("")  # a resume from step 1 writes it again
    assert main(["resume", "out", "--checkpoint", "step_000001"]) == 0
    assert (folder / "eval_000002.jsonl").read_text() == last
