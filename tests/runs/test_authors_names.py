"""What authors name is kept apart: nothing of theirs takes the place of a number of the run's own."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from rollouts.cli import main

PARTS = """\
from rollouts import Score, Task, metric, reward

OWN = ("mean", "std", "pass@k", "reward_mean", "greedy_mean", "judged", "tasks")


class Namesake:
    def tasks(self, split, rng):
        return [Task(f"{split} {number}", answer=number) for number in range(9)]

    @reward
    def mean(self, task):
        return Score(1.0 + task.answer % 3, dict.fromkeys(OWN[1:], 100.0))

    @reward(weight=10.0)
    def tokens(self):
        return 1.0

    @metric
    def latency_seconds(self):
        return -7.0

    @metric
    def reward_failures(self):
        return -8.0

    @metric
    def tool_calls(self):
        return -9.0
"""
LOSS = """

def namesake(logprobs, advantages):
    own = {"loss": 5.0, "entropy": 6.0, "mine": 7.0, "mismatch/k3": 8.0}
    return -logprobs * advantages, own | {"reward/mean": 9.0, "group/kept_frac": 9.0, "time/step": 9.0}
"""
PARTS_SAID = {"mean", "tokens", "std", "pass@k", "reward_mean", "greedy_mean", "judged", "tasks"}
METRICS = {"latency_seconds": -7.0, "reward_failures": -8.0, "tool_calls": -9.0}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rewards_of(path: Path) -> list[float]:
    return [json.loads(line)["reward"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("envs", [["./parts.py:Namesake"], ["a=./parts.py:Namesake", "b=./parts.py:Namesake"]])
def test_names_of_authors_replace_no_metric_of_a_run(here, envs):
    flags = [word for env in envs for word in ("--env", env)]
    size = ["--steps", "2", "--prompts-per-step", "2", "--samples-per-prompt", "2", "--max-tokens", "8"]
    assert main(["run", *flags, *size, "--eval-tasks", "3", "--eval-every", "1", "--out", "out"]) == 0
    lines = [json.loads(line) for line in (here / "out/metrics.jsonl").read_text().splitlines()]
    for step, line in enumerate(lines):
        rewards = rewards_of(here / f"out/trajectories/step_{step:06d}.jsonl")
        assert line["reward/mean"] == pytest.approx(statistics.fmean(rewards)) and line["reward/mean"] > 10
        assert line["reward/std"] == pytest.approx(statistics.stdev(rewards)) and "reward/pass@k" not in line
        assert {name.partition("/")[2] for name in line if name.startswith("reward_part/")} == PARTS_SAID
        assert {name: line[f"metric/{name}"] for name in METRICS} == METRICS
        assert line["rollout/latency_p50"] > 0 and "rollout/reward_failures" not in line
        assert not [name for name in line if name.startswith(("rollout/tool_calls", "env/")) and len(envs) == 1]
    evaluation = json.loads((here / "out/summary.json").read_text())["evaluation"]["after"]
    assert set(evaluation["parts"]) == PARTS_SAID and evaluation["parts"]["std"] == 100.0
    assert evaluation["reward_mean"] == pytest.approx(evaluation["parts"]["mean"] + 10)
    first = lines[0]
    assert first["eval/reward_mean"] == pytest.approx(first["eval/reward_part/mean"] + 10)
    assert first["eval/reward_part/reward_mean"] == 100.0


def test_what_a_loss_reports_replaces_no_metric_of_a_run(here):
    (here / "parts.py").write_text(PARTS + LOSS)
    size = ["--steps", "1", "--prompts-per-step", "1", "--samples-per-prompt", "4", "--max-tokens", "8"]
    arguments = ["--env", "./parts.py:Namesake", "--loss", "./parts.py:namesake", *size, "--eval-tasks", "0"]
    assert main(["run", *arguments, "--out", "out"]) == 0
    line = json.loads((here / "out/metrics.jsonl").read_text())
    reported = {name: line[f"policy/reported/{name}"] for name in ("loss", "entropy", "mismatch/k3")}
    assert reported == {"loss": 5.0, "entropy": 6.0, "mismatch/k3": 8.0} and line["policy/mine"] == 7.0
    assert abs(line["policy/loss"]) < 1e-6, "the rewards are all the same"
    assert 0 < line["policy/entropy"] < 4 and line["mismatch/k3"] < 1e-3
    assert line["policy/reported/reward/mean"] == 9.0
    assert line["reward/mean"] > 10 and line["group/kept_frac"] == 1.0 and line["time/step"] != 9.0


def test_names_of_authors_replace_no_number_of_an_evaluation(here):
    flags = ["--env", "./parts.py:Namesake", "--model", "tiny", "--eval-tasks", "3", "--max-tokens", "8"]
    assert main(["eval", *flags, "--out", "out"]) == 0
    summary = json.loads((here / "out/summary.json").read_text())
    rewards = rewards_of(here / "out/trajectories/eval.jsonl")
    assert summary["reward_mean"] == pytest.approx(statistics.fmean(rewards)) and summary["reward_mean"] > 10
    assert (summary["tasks"], summary["judged"], summary["metrics"]) == (3, 3, METRICS)
    assert set(summary["parts"]) == PARTS_SAID and summary["tool_calls"] == 0
    line = json.loads((here / "out/metrics.jsonl").read_text())
    assert (line["eval/reward_mean"], line["eval/tasks"]) == (summary["reward_mean"], 3)
    assert line["eval/reward_part/reward_mean"] == 100.0 and line["eval/metric/latency_seconds"] == -7.0
