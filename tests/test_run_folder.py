"""The run folder: what may be written to, files whole or not at all, and what a trajectory's line says."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from rollouts.errors import ConfigError, OutputError
from rollouts.runs.folder import RunFolder, check_out, default_out, episode_records, holds_run, read_json
from rollouts.types import Episode, Message, Score, Segment, Status, Task, ToolCall, Trajectory


@pytest.mark.parametrize(
    ("env", "loss", "ending"),
    [
        ("calculator", "grpo", "-calculator-grpo"),
        ("./my env.py:Game", "acme/loss", "-my-env-loss"),
        ("gym/FrozenLake-v1", "./l.py:f", "-FrozenLake-v1-l"),
    ],
)
def test_default_out(env, loss, ending):
    out = default_out(env, loss)
    assert out.startswith("runs/") and out.endswith(ending)
    assert out.count("/") == 1 and " " not in out and ":" not in out


def test_check_out_creates_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty", "a/b/c"):
        assert check_out(str(tmp_path / name)) == tmp_path / name
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_check_out_refuses(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for name, words in (("full", "exists already"), ("full/x", "exists already"), ("full/x/y", "cannot be made")):
        with pytest.raises(OutputError, match=words) as caught:
            check_out(str(tmp_path / name))
        assert "--out" in str(caught.value)


def test_check_out_of_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(OutputError, match="cannot be written"):
        check_out(str(tmp_path / "new"))


def test_files_are_whole(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    folder.write_text("config.toml", "steps = 1\n")
    folder.write_text("config.toml", "steps = 2\n")
    folder.write_json("summary.json", {"steps": 2, "loss": math.nan, "path": tmp_path})
    assert (folder.path / "config.toml").read_text() == "steps = 2\n"
    assert json.loads((folder.path / "summary.json").read_text()) == {"steps": 2, "loss": None, "path": str(tmp_path)}
    assert sorted(path.name for path in folder.path.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.toml",
        "summary.json",
        "trajectories",
    ]
    assert folder.checkpoint_path(10) == folder.path / "checkpoints" / "step_000010"


def test_a_disk_that_refuses(tmp_path):
    folder = RunFolder(tmp_path / "run")
    (folder.path / "config.toml").mkdir()
    (folder.path / "trajectories" / "step.jsonl").mkdir()
    with pytest.raises(OutputError, match=r"config\.toml cannot be written"):
        folder.write_text("config.toml", "x")
    with pytest.raises(OutputError, match=r"step\.jsonl cannot be written"):
        folder.write_trajectories("step", [])


def test_discard_leaves_nothing_but_what_was_there(tmp_path):
    (tmp_path / "kept").mkdir()
    for name in ("kept/new", "kept"):
        folder = RunFolder(tmp_path / name)
        folder.write_text("config.toml", "x")
        folder.discard()
        assert [path.name for path in tmp_path.rglob("*")] == ["kept"]


def test_a_folder_whose_path_contains_the_working_directory_is_itself(tmp_path):
    """Only a path that begins with the working directory is below it."""
    inside = tmp_path / "mnt" / str(tmp_path).strip("/") / "run"
    folder = RunFolder(inside, home=tmp_path)
    assert str(folder.shown) == f"mnt{tmp_path}/run" and folder.path == inside and inside.is_dir()
    assert folder.in_words(f"{tmp_path}/a and /x{tmp_path}/b") == f"a and /x{tmp_path}/b"
    outside = RunFolder(tmp_path / "mnt2", home=tmp_path / "mnt")
    assert outside.shown == tmp_path / "mnt2"


def test_files_of_others_in_the_folder_are_no_reason_to_end_a_run(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    synced = []

    def sync_file(path):
        synced.append(path.name)
        raise PermissionError("another user's")

    monkeypatch.setattr("rollouts.runs.folder.sync_file", sync_file)
    (folder.path / "theirs").touch()
    (folder.path / "weights").mkdir()
    (folder.path / "weights" / "v1").touch()
    folder.sync()
    assert "theirs" in synced and "v1" not in synced


def test_what_a_kill_at_the_very_beginning_left_is_no_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.close()
    (folder.path / ".config.toml.partial").write_text("ste")
    assert check_out(str(folder.path)) == folder.path and not holds_run(folder.path)
    (folder.path / "trajectories" / "step_000000.jsonl").touch()
    with pytest.raises(OutputError, match="exists already"):
        check_out(str(folder.path))


def test_a_folder_is_reopened_and_never_discarded(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run: it has no config\.toml"):
        RunFolder.reopen(tmp_path)
    folder = RunFolder(tmp_path / "run")
    folder.write_text("config.toml", "steps = 1\n")
    folder.close()
    folder.close()
    again = RunFolder.reopen(tmp_path / "run")
    again.discard()
    assert holds_run(folder.path)
    with pytest.raises(OutputError, match="exists already"):
        RunFolder(tmp_path / "run")


def test_what_tells_of_later_steps_is_taken_back(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for step in range(4):
        folder.write_trajectories(f"step_{step:06d}", [{"group": step}])
    (folder.path / "trajectories" / ".step_000001.jsonl.partial").write_text("{")
    folder.write_json("summary.json", {"status": "failed"})
    assert (
        read_json(folder.path / "summary.json") == {"status": "failed"}
        and read_json(folder.path / "manifest.json") == {}
    )
    folder.forget_steps(2)
    left = sorted(path.name for path in (folder.path / "trajectories").iterdir())
    indices = [".step_000000.index", ".step_000001.index"]
    assert left == [*indices, "step_000000.jsonl", "step_000001.jsonl"]
    assert not (folder.path / "summary.json").exists()


def test_one_process_at_a_time(tmp_path):
    """Another process, and another folder object of this one, are refused with who holds the lock; a kill frees it."""
    (tmp_path / "run").mkdir()
    code = (
        "import sys, time; from pathlib import Path; from rollouts.runs.folder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1])); folder.write_text('config.toml', ''); print('locked', flush=True)\n"
        "time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(OutputError, match=rf"written to by another process \(process {other.pid} on .*\); wait"):
            RunFolder.reopen(tmp_path / "run")
    finally:
        other.kill()
        other.communicate()
    mine = RunFolder.reopen(tmp_path / "run")
    with pytest.raises(OutputError, match="another process"):
        RunFolder.reopen(tmp_path / "run")
    mine.close()
    RunFolder.reopen(tmp_path / "run").close()


def test_trajectory_lines(tmp_path):
    call = ToolCall("add", {"a": 1}, id="c0")
    messages = [Message("user", "1 + 1?"), Message("assistant", "", tool_calls=[call]), Message("tool", "2")]
    segment = Segment([7, 8, 9], [0.0, 1.0, 0.5], [0.0, -0.12345678, -1.0], [-1, 3, 3])
    trajectory = Trajectory(Task("1 + 1?", answer=2), messages, [segment], Status.COMPLETED, {"turns": 1.0})
    episode = Episode((4, 1), trajectory.task, [trajectory], Score(None, {"right": None}, "no"), {})
    (record,) = episode_records(episode, advantage=0.5)
    folder = RunFolder(tmp_path / "run")
    folder.write_trajectories("step_000000", [record, record])
    lines = (folder.path / "trajectories" / "step_000000.jsonl").read_text().splitlines()
    assert len(lines) == 2
    found = json.loads(lines[0])
    assert (found["group"], found["rollout"], found["status"], found["reward"]) == (4, 1, "completed", None)
    assert found["task"] == {"prompt": "1 + 1?", "answer": 2}
    assert found["messages"][1] == {
        "role": "assistant",
        "tool_calls": [{"name": "add", "arguments": {"a": 1}, "id": "c0"}],
    }
    streams = {"tokens": [7, 8, 9], "loss_mask": [0, 1, 0.5], "logprobs": [0.0, -0.123457, -1.0]}
    assert found["segments"] == [{**streams, "versions": [-1, 3, 3], "turns": []}]
