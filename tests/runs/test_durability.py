"""A crash of the machine, a full disk, a lost checkpoint, a changed working directory: what has been done is kept."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
import warnings
from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.errors import OutputError
from rollouts.models.loading import TINY_PATH
from rollouts.runs.folder import RunFolder
from rollouts.training.backends.torch import TorchBackend

PARTS = '''\
import os
from pathlib import Path


def elsewhere(trajectory):
    """A reward that leaves the working directory."""
    os.chdir("/")
    return 1.0


class Stop:
    """Fails as it is told of the step in the file `stop`, if there is one."""

    in_step = True

    def __init__(self, folder):
        pass

    def log(self, metrics, step):
        if Path("stop").exists() and int(Path("stop").read_text()) == step:
            raise OSError("stopped")

    def close(self):
        pass
'''

FASTEST = ["--env", "calculator", "--prompts-per-step", "2", "--samples-per-prompt", "2", "--eval-tasks", "0",
           "--max-tokens", "8", "--logger", "jsonl", "--logger", "./parts.py:Stop"]  # fmt: skip
SFT = ["run", "--mode", "sft", *FASTEST]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saving(steps):
    """The arguments of a run of this many steps with a checkpoint after each."""
    return [*SFT, "--steps", str(steps), "--checkpoint-every", "1"]


@pytest.fixture
def begun(made_run):
    """Makes such a run in `out`; it stops as the step `stop` is logged."""

    def make(steps, stop=None):
        if stop is not None:
            Path("stop").write_text(str(stop))
        made_run(saving(steps), "out", code=0 if stop is None else 1)
        Path("stop").unlink(missing_ok=True)

    return make


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def refused(capsys, *arguments):
    """The error of a command that leaves the run in `out` as it was."""
    kept = files_of("out")
    capsys.readouterr()
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    assert files_of("out") == kept
    return error


def checkpoints():
    return sorted(path.name for path in Path("out/checkpoints").iterdir())


def losses(folder):
    return [json.loads(line)["policy/loss"] for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


# --- a crash of the machine -----------------------------------------------------------------------------------------


def stamp(stat):
    return stat.st_mtime_ns, stat.st_size


def test_what_a_checkpoint_tells_of_is_on_the_disk_before_it(monkeypatch):
    """At each save, every file and folder of the run is synced as it is then."""
    synced, fsync, save, unsynced = {}, os.fsync, TorchBackend.save, []

    def recording(descriptor):
        fsync(descriptor)
        found = os.fstat(descriptor)
        synced[found.st_ino] = stamp(found)

    def syncing(self, path, state=None):
        outside = [each for each in Path("out").rglob("*") if "checkpoints" not in each.parts[1:2]]
        assert {"config.toml", "manifest.json", "metrics.jsonl", "step_000000.jsonl"} <= {p.name for p in outside}
        for each in outside:
            known = synced.get(each.stat().st_ino)
            is_new = known is None if each.is_dir() else known != stamp(each.stat())
            unsynced.extend([str(each)] if is_new and each.name != ".lock" else [])
        return save(self, path, state)

    monkeypatch.setattr(os, "fsync", recording)
    monkeypatch.setattr(TorchBackend, "save", syncing)
    assert main(["run", *FASTEST, "--steps", "2", "--checkpoint-every", "1", "--out", "out"]) == 0
    assert unsynced == []
    for each in ("out", "out/checkpoints", "out/summary.json"):
        assert Path(each).stat().st_ino in synced


def test_lines_that_are_missing_are_told_and_the_run_goes_on(begun, capsys):
    begun(3, 2)
    path = Path("out/metrics.jsonl")
    path.write_bytes(b"\0" * 10 + path.read_bytes().split(b"\n", 1)[1])
    capsys.readouterr()
    assert main(["resume", "out"]) == 0
    said = capsys.readouterr().out
    assert "metrics.jsonl lacks 2 of the 2 steps before (the first is step 0)" in said
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2]


def test_a_file_that_an_earlier_version_did_not_write_is_not_called_damaged(begun, capsys):
    """It had no logger `jsonl` if another one was chosen. The steps that are logged now are not excused later."""
    begun(3, 1)
    manifest = json.loads(Path("out/manifest.json").read_text())
    others = [each for each in manifest["components"] if each["name"] != "jsonl"]
    assert len(others) == len(manifest["components"]) - 1 and any(each["kind"] == "loggers" for each in others)
    Path("out/manifest.json").write_text(json.dumps(manifest | {"components": others}))
    Path("out/metrics.jsonl").unlink()
    capsys.readouterr()
    assert main(["resume", "out"]) == 0 and main(["resume", "out", "--steps", "4"]) == 0
    assert "lacks" not in capsys.readouterr().out
    assert [json.loads(line)["step"] for line in Path("out/metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    Path("out/metrics.jsonl").write_text("")
    assert main(["resume", "out", "--steps", "5"]) == 0
    assert "metrics.jsonl lacks 3 of the 4 steps before (the first is step 1)" in capsys.readouterr().out


@pytest.mark.parametrize("left", [0, 100])
def test_a_torn_config_is_one_error(begun, left, capsys):
    begun(2, 1)
    path = Path("out/config.toml")
    path.write_text(path.read_text()[:left].rpartition('"')[0])
    again = [*SFT, "--steps", "2", "--out", "out"]
    for command in (["resume", "out"], [*again, "--resume", "auto"]):
        error = refused(capsys, *command)
        assert "out/config.toml" in error and "rollouts config SETTINGS > out/config.toml" in error
    capsys.readouterr()
    path.write_text("")
    assert "out/config.toml is empty" in refused(capsys, "resume", "out")


# --- one process at a time ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_does_not_hold_the_lock(here):
    folder = RunFolder(here / "run")
    folder.write_text("config.toml", "steps = 1\n")
    (mine, its), (heard, said) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:  # it lives until the parent has looked
        os.close(its)
        os.write(said, b".")
        os.read(mine, 1)
        os._exit(0)
    try:
        os.read(heard, 1)
        with pytest.raises(OutputError, match="another process"):
            RunFolder.reopen(here / "run")
        folder.close()
        RunFolder.reopen(here / "run").close()
    finally:
        for each in (its, mine, heard, said):
            os.close(each)
        os.waitpid(child, 0)


def test_runs_that_begin_at_one_moment_take_other_names(monkeypatch, here):
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    for _ in range(2):
        assert main([*SFT, "--steps", "0"]) == 0
    assert main([*SFT, "--mode", "sft+rl", "--loss", "grpo", "--steps", "0", "--sft.steps", "1"]) == 0
    found = sorted(each.name for each in Path("runs").iterdir() if (each / "summary.json").exists())
    name = "20260101-000000-calculator"
    assert found == [f"{name}-grpo", f"{name}-sft", f"{name}-sft-2"]


def test_folders_that_are_made_at_one_moment_have_different_names(here):
    made, start = [], threading.Barrier(5)

    def make():
        start.wait()
        made.append(RunFolder.new(Path("runs/one"), here))

    threads = [threading.Thread(target=make) for _ in range(5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert {str(each.shown) for each in made} == {"runs/one", *(f"runs/one-{number}" for number in range(2, 6))}
    for each in made:
        each.discard()
    assert not list(here.glob("runs/*"))


# --- a lost checkpoint ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [None, 1])
def test_a_run_whose_checkpoints_are_gone_is_not_overwritten(begun, stop, capsys):
    begun(2, stop)
    shutil.rmtree("out/checkpoints")
    Path("out/checkpoints").mkdir()
    for command in (["resume", "out", "--steps", "4"], [*SFT, "--steps", "4", "--out", "out", "--resume", "auto"]):
        error = refused(capsys, *command)
        assert f"out/checkpoints/step_00000{1 if stop else 2}, which is missing" in error
        assert "begin again with: rollouts run out/config.toml --out FOLDER" in error
    for name in ("manifest.json", "summary.json"):  # of another version, or lost in a crash
        Path("out", name).unlink()
    if not stop:
        assert "step_000001, which is missing" in refused(capsys, "resume", "out"), "metrics tell of a save"


def test_a_last_checkpoint_that_is_gone_is_told(begun, capsys):
    begun(3, 2)
    shutil.rmtree("out/checkpoints/step_000002")
    error = refused(capsys, "resume", "out")
    assert "go on from step_000001 with: rollouts resume out --checkpoint step_000001" in error
    again = [*SFT, "--steps", "3", "--checkpoint-every", "1", "--out", "out", "--resume", "auto"]
    assert main(again) == 0
    assert "step_000002, which is missing; continuing from step_000001 instead" in capsys.readouterr().out
    assert checkpoints() == ["step_000001", "step_000002", "step_000003"]


def test_a_checkpoint_without_a_manifest_is_not_passed_over(begun, capsys):
    begun(3, 2)
    Path("out/checkpoints/step_000002/manifest.json").unlink()
    error = refused(capsys, "resume", "out")
    assert "out/checkpoints/step_000002 has no manifest.json" in error and "--checkpoint step_000001" in error
    assert "step_000002 has no manifest.json" in refused(capsys, "export", "out", "model")
    assert main([*SFT, "--steps", "3", "--out", "out", "--resume", "auto"]) == 0
    said = capsys.readouterr().out
    assert "step_000002 has no manifest.json" in said and "continuing from step_000001 instead" in said


# --- the working directory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sft+rl", pytest.param("eval", marks=pytest.mark.nightly)])
def test_an_authors_code_may_leave_the_working_directory(mode, here):
    shutil.copytree(TINY_PATH, "model")
    (here / "rows.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n{"prompt": "3"}\n')
    env = ["--env", "prompts", "--data", "rows.jsonl", "--reward", "./parts.py:elsewhere", "--max-tokens", "4"]
    words = ["eval", *env, "--eval-tasks", "1"]
    if mode == "sft+rl":
        words = ["run", "--mode", mode, *env, "--prompts-per-step", "1", "--samples-per-prompt", "2", "--steps", "2"]
        words += ["--checkpoint-every", "1", "--critic", "model", "--loss", "ppo", "--eval-tasks", "1"]
        words += ["--sft.env", "calculator", "--sft.steps", "1", "--sft.eval-tasks", "1"]
    assert main([*words, "--model", "model", "--out", "runs/out"]) == 0
    assert os.getcwd() == "/"
    assert json.loads((here / "runs/out/summary.json").read_text())["status"] == "done"
    saved = [path.parent.name for path in sorted((here / "runs/out").glob("*/checkpoints/*/tokenizer.json"))]
    assert saved == (["step_000001", "step_000002", "step_000001"] if mode == "sft+rl" else [])


# --- saving by the clock, and a full disk ---------------------------------------------------------------------------


def saves_of(monkeypatch):
    """The names of the checkpoints that are written from now on."""
    save, seen = TorchBackend.save, []
    monkeypatch.setattr(
        TorchBackend, "save", lambda self, path, state=None: seen.append(Path(path).name) or save(self, path, state)
    )
    return seen


@pytest.mark.slow
def test_a_run_saves_by_the_clock_and_keeps_the_newest(monkeypatch, capsys):
    assert main([*SFT, "--steps", "4", "--out", "whole"]) == 0
    assert "checkpoint_seconds = 600.0" in Path("whole/config.toml").read_text()
    saves = saves_of(monkeypatch)
    Path("stop").write_text("2")
    assert main([*SFT, "--steps", "4", "--out", "out", "--checkpoint-seconds", "0.000001"]) == 1
    assert checkpoints() == ["step_000002"]
    Path("stop").unlink()
    assert main(["resume", "out"]) == 0
    assert saves == [f"step_00000{step}" for step in (1, 2, 3, 4)] and checkpoints() == ["step_000004"]
    assert losses("out") == losses("whole")
    last = "checkpoints/step_000004/model.safetensors"
    assert Path("out", last).read_bytes() == Path("whole", last).read_bytes()
    saves.clear()
    shutil.rmtree("out")
    assert main([*saving(3), "--out", "out", "--checkpoint-every", "2", "--checkpoint-seconds", "0.000001"]) == 0
    assert saves == ["step_000002", "step_000003"] == checkpoints()


def with_free(monkeypatch, *free):
    """The disk has so many bytes free, one number a look; the last one stays."""
    left = list(free)
    usage = shutil._ntuple_diskusage
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 0, left.pop(0) if len(left) > 1 else left[0]))


def test_too_little_room_is_told_early(monkeypatch, capsys):
    with_free(monkeypatch, 6 << 20)
    assert main([*saving(4), "--out", "out"]) == 0
    said = capsys.readouterr().out
    assert "warning: 4 checkpoints take about" in said and "free; make room, or keep fewer" in said
    shutil.rmtree("out")
    with_free(monkeypatch, 1 << 40, 1 << 40, 1000)
    assert main([*saving(3), "--out", "out"]) == 0
    said = capsys.readouterr().out
    assert said.count("warning: the next checkpoint takes about") == 1 and "has 0.0 MiB free" in said


def test_too_little_room_for_the_trajectories_to_come_is_told_once(monkeypatch, capsys):
    with_free(monkeypatch, 1000)
    rl = ["run", *FASTEST, "--checkpoint-seconds", "0", "--steps", "3"]
    assert main([*rl, "--out", "out"]) == 0
    said = capsys.readouterr().out
    assert said.count("warning: the trajectories of the 2 steps to come take about 0.0 MiB, and the disk of out") == 1
    assert main([*rl, "--out", "few", "--keep-trajectories", "1"]) == 0
    assert "warning: the trajectories" not in capsys.readouterr().out, "each step replaces the one before"


def test_a_checkpoint_by_the_clock_takes_no_room_that_the_last_one_needs(monkeypatch, capsys):
    saves = saves_of(monkeypatch)
    with_free(monkeypatch, 7 << 20)  # room for one
    assert main([*SFT, "--steps", "2", "--out", "out", "--checkpoint-seconds", "0.000001"]) == 0
    assert saves == ["step_000002"] and "warning: no checkpoint was written" in capsys.readouterr().out


def full_at(monkeypatch, number):
    """The disk is full as the n-th checkpoint gets its name."""
    replace, seen = os.replace, []

    def refusing(source, target):
        if Path(target).parent.name == "checkpoints" and "step_" in Path(target).name[:5]:
            seen.append(target)
            if len(seen) == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(source, target)

    monkeypatch.setattr(os, "replace", refusing)


def test_a_full_disk_loses_nothing_that_was_saved(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        full_at(patch, 2)
        assert main([*SFT, "--steps", "3", "--out", "whole", "--checkpoint-seconds", "0.000001"]) == 0
        assert "No space left on device; free some space" in capsys.readouterr().out, "by the clock it is left out"
    with monkeypatch.context() as patch:
        full_at(patch, 3)
        assert main([*SFT, "--steps", "3", "--out", "out", "--checkpoint-seconds", "0.000001"]) == 1
    error = capsys.readouterr().err
    assert "The checkpoints before it are as they were" in error and "go on with: rollouts resume out" in error
    assert checkpoints() == ["step_000002"] and len(losses("out")) == 3
    assert main(["resume", "out"]) == 0
    assert losses("out") == losses("whole") and checkpoints() == ["step_000003"]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--lora-rank", "64"], marks=pytest.mark.nightly),
        ["--critic", "head", "--loss", "ppo", "--reference", "ema"],
    ],
)
def test_the_size_of_a_checkpoint_is_known_before(more, monkeypatch):
    known, close = [], TorchBackend.close
    monkeypatch.setattr(TorchBackend, "close", lambda self: known.append(self.checkpoint_bytes) or close(self))
    assert main(["run", *FASTEST, "--steps", "1", "--out", "out", *more]) == 0
    folder = Path("out/checkpoints/step_000001")
    tensors = [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".distcp")]
    assert known[0] == pytest.approx(sum(path.stat().st_size for path in tensors), rel=0.1)
