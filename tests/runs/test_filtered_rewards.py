"""Filters see the rewards that the advantage sees: a group that has a gradient is not dropped, one without is."""

from __future__ import annotations

import json

import pytest

from rollouts.cli import main
from rollouts.errors import ConfigError
from rollouts.training.filters import accuracy_std

PARTS = """\
import json

from rollouts import Task, reward


class Same:
    def tasks(self, split, rng):
        return [Task(f"{split} {number}") for number in range(9)]

    @reward
    def right(self):
        return 1.0

    @reward(weight=0.0)
    def length(self, trajectory):
        return float(len(trajectory.last_text))


def shorter(rewards, lengths):
    return rewards - lengths.double() / 128


def longest(parts, weights):
    return parts[:, 1]


def spy(rewards, scores, parts, samples):
    said = {"rewards": rewards, "scores": scores, "parts": parts, "samples": [s.reward for s in samples]}
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps(said) + "\\n")
    return True
"""
SMALL = ["--env", "./parts.py:Same", "--steps", "1", "--prompts-per-step", "3", "--samples-per-prompt", "6"]
SMALL += ["--max-tokens", "12", "--temperature", "1.5", "--eval-tasks", "0", "--out", "out"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_group_that_only_shaping_tells_apart_is_kept(here):
    assert main(["run", *SMALL, "--shaping", "./parts.py:shorter", "--filter", "nonzero_std"]) == 0
    (line,) = [json.loads(line) for line in (here / "out/metrics.jsonl").read_text().splitlines()]
    assert line["group/kept_frac"] > 0 and line["optim/grad_norm"] > 0
    assert line["group/zero_std_frac"] == 1.0, "the rewards themselves are the same"


def test_dapo_asks_what_is_right_and_not_how_long_it_is(here):
    arguments = ["--loss", "dapo", "--shaping.algorithm.buffer", "12"]
    assert main(["run", *SMALL, *arguments]) == 0
    (line,) = [json.loads(line) for line in (here / "out/metrics.jsonl").read_text().splitlines()]
    assert line["group/kept_frac"] == 0.0 and line["group/drop/zero_std"] == 3


def test_a_filter_sees_mixed_and_shaped_rewards_and_what_they_were_made_of(here):
    assert main(["run", *SMALL, "--mix", "./parts.py:longest", "--shaping", "./parts.py:shorter",
                 "--filter", "./parts.py:spy"]) == 0  # fmt: skip
    groups: dict[int, list[dict]] = {}
    for line in (here / "out/trajectories/step_000000.jsonl").read_text().splitlines():
        record = json.loads(line)
        groups.setdefault(record["group"], []).append(record)
    expected = []
    for records in groups.values():
        lengths = [sum(sum(segment["loss_mask"]) for segment in record["segments"]) for record in records]
        rewards = [record["parts"]["length"] - length / 128 for record, length in zip(records, lengths, strict=True)]
        scores = [record["reward"] for record in records]
        parts = [record["parts"] for record in records]
        expected.append({"rewards": rewards, "scores": scores, "parts": parts, "samples": rewards})
    seen = [json.loads(line) for line in (here / "seen.jsonl").read_text().splitlines()]
    assert len(seen) == 3 and all(each["scores"] == [1.0] * 6 for each in seen)
    assert sorted(map(str, seen)) == sorted(map(str, expected))


def test_accuracy_is_a_part_or_the_whole_score():
    parts = [{"right": 1.0, "brief": 0.2}, {"right": 1.0, "brief": 0.7}, {"right": None, "brief": 0.1}]
    assert accuracy_std([1.2, 1.7, None], parts) is True
    assert accuracy_std([1.2, 1.7, None], parts, part="right") == "zero_std"
    assert accuracy_std([1.2, 1.7, None], parts, part="brief") is True
    assert accuracy_std([1.2, None, None], parts, part="brief") == "fewer_than_two_rewards"
    with pytest.raises(ConfigError, match="have no part 'rihgt'; they have brief, right"):
        accuracy_std([1.2, 1.7, None], parts, part="rihgt")
    assert accuracy_std([1.2, 1.7, None], parts, part="solved") == "no_part_solved", "no reward gave it this time"
