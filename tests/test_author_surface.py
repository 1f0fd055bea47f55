"""What an author's code may raise and return: a run goes on, or ends with one clear error; its files can be read."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from rollouts.cli import main

RUN = [
    "--steps",
    "1",
    "--prompts-per-step",
    "1",
    "--samples-per-prompt",
    "2",
    "--eval-tasks",
    "1",
    "--max-tokens",
    "16",
]

PARTS = '''\
import asyncio
import sys

import torch

from rollouts import Task, reward
from rollouts.env import metric, tool
from rollouts.plugins import hookimpl


class Unreadable:
    def __str__(self):
        raise KeyboardInterrupt("no str")

    __repr__ = __str__


class UnreadableError(Exception):
    def __str__(self):
        raise SystemExit(7)


def around():
    inside = {}
    inside["me"] = [inside]
    return inside


def deep(levels=3000):
    value = {}
    for _ in range(levels):
        value = {"in": value}
    return value


class Quiet:
    """Ends after one reply."""

    def tasks(self, split, rng):
        return [Task(f"task {n}", id=f"{split} {n}") for n in range(4)]

    @reward
    def length(self, trajectory):
        return float(len(trajectory.last_text) % 3)


class Unwritable(Quiet):
    """Everything that JSON cannot hold."""

    def tasks(self, split, rng):
        info = {"around": around(), "deep": deep(), "object": Unreadable(), (1, 2): "a tuple", "big": 10**5000}
        return [Task(f"caf\\ud800 {split} {n}", answer=10**5000, info=info) for n in range(4)]

    def setup(self, task):
        self.said = False

    def reply(self, trajectory):
        if self.said:
            return None
        self.said = True
        return "again \\udfff"

    @reward
    def judged(self, trajectory):
        raise ValueError("no \\ud800 number")


def scored(trajectory):
    from rollouts.types import Score

    return Score(float(len(trajectory.last_text) % 3), {"part \\ud800": 1.0}, "why \\ud800")
'''


@pytest.fixture(autouse=True)
def parts(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def records(folder):
    return [json.loads(line) for path in sorted(Path(folder, "trajectories").iterdir())
            for line in path.read_text(encoding="utf-8").splitlines()]  # fmt: skip


def test_what_json_cannot_hold_is_replaced_in_the_runs_files_and_a_resume_reads_them(capsys):
    parts = ["--env", "./parts.py:Unwritable", "--reward", "./parts.py:scored", "--reward", "env:1"]
    assert main(["run", *parts, *RUN, "--on-invalid-reward", "zero", "--checkpoint-every", "1", "--out", "out"]) == 0
    assert main(["resume", "out", "--steps", "2"]) == 0, capsys.readouterr().err
    written = records("out")
    for record in written:
        assert record["task"]["answer"] == "<replaced: an integer of 16610 bits>"
        info = record["task"]["info"]
        assert info["around"]["me"] == ["<replaced: the same dict again, which contains itself>"]
        assert "whose str raised" in info["object"] and info["(1, 2)"] == "a tuple"
        assert "nested deeper than 100" in json.dumps(info["deep"])
        assert record["messages"][0]["content"].startswith("caf\\ud800")
        assert "no \\ud800 number" in record["why"]
    assert any(message["content"] == "again \\udfff" for message in written[0]["messages"])
