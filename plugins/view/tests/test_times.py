"""When everything in a step happened: the file beside its trajectories."""

from __future__ import annotations

import json

import pytest

import rollouts
from rollouts.errors import ConfigError
from rollouts.runs.folder import RunFolder, episode_records
from rollouts.runs.times import evaluation_times, read_times, step_times
from rollouts.types import EpisodeTimes

SMALL = {"prompts_per_step": 2, "samples_per_prompt": 2, "eval_tasks": 2, "eval_every": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps that samples one step ahead."""
    out = tmp_path_factory.mktemp("times") / "run"
    rollouts.run(env="calculator", loss="grpo", steps=3, staleness=1, keep_trajectories=2, out=str(out), **SMALL)
    return out


def lines_of(file):
    return [json.loads(line) for line in (file.parent / f"{file.stem[1:]}.jsonl").read_text().splitlines()]


def test_episodes_are_those_of_the_lines(trained):
    files = sorted((trained / "trajectories").glob(".*.times"))
    assert [file.stem[1:] for file in files] == [
        "eval_000000", "eval_000002", "eval_000003", "step_000001", "step_000002",
    ]  # fmt: skip
    for file in files:
        times, lines = read_times(file), lines_of(file)
        assert [each.line for each in times.episodes] == list(range(len(lines)))
        for each, line in zip(times.episodes, lines, strict=True):
            assert (each.group, each.rollout) == (line["group"], line["rollout"])
            moments = [each.began, *(moment for reply in each.replies for moment in reply), each.ended]
            assert moments == sorted(moments)
            assert len(each.replies) >= line["metrics"]["turns"] > 0


def test_phases_follow_each_other_and_are_those_of_the_metrics(trained):
    metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for step in (1, 2):
        times = read_times(trained / "trajectories" / f".step_{step:06d}.times")
        names, begins, ends = zip(*times.phases, strict=True)
        assert names == ("wait", "prepare", "train", "sync", "finish")
        assert begins[0] == 0 and begins[1:] == ends[:-1]
        seconds = dict(zip(names, ends, strict=True))
        assert seconds["wait"] == pytest.approx(metrics[step]["time/wait"], abs=1e-3)
        assert seconds["sync"] == pytest.approx(metrics[step]["time/step"], abs=1e-3)
        assert max(each.ended for each in times.episodes) <= seconds["wait"] + 1e-3
        assert any(each.began < 0 for each in times.episodes), "a prefetched step began before"


def test_lines_have_the_age_of_their_oldest_token(trained):
    ages = [line["staleness"] for line in lines_of(trained / "trajectories" / ".step_000002.times")]
    metrics = json.loads((trained / "metrics.jsonl").read_text().splitlines()[2])
    assert max(ages) == metrics["staleness/max"]


def test_a_resumed_run_writes_them_again(trained):
    folder = RunFolder.reopen(trained)
    folder.forget_steps(2)
    folder.close()
    left = sorted(file.stem[1:] for file in (trained / "trajectories").glob(".*.times"))
    assert left == ["eval_000000", "eval_000002", "step_000001"]


def test_episodes_without_times_keep_their_lines(make_episode):
    episodes = [make_episode(number) for number in range(3)]
    episodes[1] = episodes[1]._replace(times=EpisodeTimes(100.0, 102.0, [(100.5, 101.0)]))
    times = evaluation_times(episodes)
    assert times.zero == 100.0 and len([line for each in episodes for line in episode_records(each)]) == 3
    assert times.episodes == [(1, 0, 1, 0.0, 2.0, [(0.5, 1.0)])]
    assert step_times([], []).episodes == []


@pytest.mark.parametrize("content", ["", "{", '{"zero": 1, "version": 2}', '{"zero": 1, "format": "other"}', "\xff"])
def test_damaged_files_are_refused(content, tmp_path):
    file = tmp_path / "step_000000.times"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"step_000000.times (is damaged|has the format)"):
        read_times(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_times(tmp_path / "step_000001.times")
