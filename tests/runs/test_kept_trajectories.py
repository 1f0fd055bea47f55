"""`--keep-trajectories N`: which files a run removes, and what readers say of the steps that are missing on purpose."""

from __future__ import annotations

import shutil

import pytest

import rollouts
from rollouts.cli import main
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError
from rollouts.runs.folder import CONFIG, RunFolder, note_removed, removed_steps
from rollouts.runs.resume import _missing_steps
from rollouts.runs.saved import open_saved

SIZE = {"env": "calculator", "prompts_per_step": 1, "samples_per_prompt": 2, "eval_tasks": 1, "max_tokens": 4}


def names(folder):
    return {path.name for path in (folder / "trajectories").iterdir()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four steps that kept two of them, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    more = {"steps": 4, "checkpoint_every": 1, "record": "tokens", "keep_trajectories": 2}
    rollouts.run(**SIZE, **more, out=str(folder))
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def written(tmp_path):
    """An open folder with the files of six steps and of an evaluation."""
    folder = RunFolder(tmp_path / "written")
    folder.write_text(CONFIG, 'mode = "rl"\n')
    for name in [*(f"step_{step:06d}" for step in range(6)), "eval_000002"]:
        folder.write_trajectories(name, [{"name": name}])
    yield folder
    folder.close()


def test_a_run_keeps_the_last_steps_whole_and_all_evaluations(trained):
    kept = {f"step_00000{step}.{kind}" for step in (2, 3) for kind in ("jsonl", "tokens")}
    kept |= {f".step_00000{step}.{kind}" for step in (2, 3) for kind in ("index", "times")}
    kept |= {name for done in (0, 4) for name in (f"eval_00000{done}.jsonl", f".eval_00000{done}.index")}
    kept |= {f".eval_00000{done}.times" for done in (0, 4)}
    assert names(trained) == kept | {"removed.json"}
    assert removed_steps(trained) == 2


def test_what_is_read_says_in_one_line_what_is_missing(trained):
    saved = open_saved(str(trained))
    assert [file.stem for file in saved.files] == ["step_000002", "step_000003"]
    (note,) = saved.notes
    assert "has the trajectories of 2 steps" in note and "of the 2 steps before" in note


def test_a_checkpoint_before_the_kept_steps_resumes(run, capsys):
    assert main(["resume", str(run), "--checkpoint", "step_000001"]) == 0
    said = capsys.readouterr().out
    assert said.count("removed by --keep-trajectories") == 1 and "lacks" not in said
    assert {"step_000002.jsonl", "step_000003.jsonl"} <= names(run) and "step_000001.jsonl" not in names(run)


def test_after_a_kill_what_is_left_is_read_and_not_called_missing(run):
    """As a process leaves it that is killed after the note, and before it has removed all files."""
    note_removed(run, 3)
    saved = open_saved(str(run))
    assert [file.stem for file in saved.files] == ["step_000002", "step_000003"] and saved.removed == 2


def test_nothing_is_left_to_read(run):
    for file in (run / "trajectories").glob("step_*"):
        file.unlink()
    with pytest.raises(ConfigError, match="those of 2 steps were removed by --keep-trajectories"):
        open_saved(str(run))


def test_a_step_that_was_lost_otherwise_is_still_a_warning(written):
    written.remove_steps(2)
    (written.path / "trajectories" / "step_000003.jsonl").unlink()
    purpose, warning = _missing_steps({}, written, 6, with_trajectories=True)
    assert "has 3 steps of the 6 before" in purpose and not purpose.startswith("warning")
    assert warning.startswith("warning: trajectories/ lacks 1 of the 6 steps before (the first is step 3)")


def test_steps_that_a_resume_repeats_are_no_longer_missing_on_purpose(written):
    written.remove_steps(4)
    written.forget_steps(1)
    assert removed_steps(written.path) == 1


def test_a_resumed_run_may_keep_fewer(run):
    config = (run / CONFIG).read_text()
    (run / CONFIG).write_text(config.replace("keep_trajectories = 2", "keep_trajectories = 1"))
    assert main(["resume", str(run), "--steps", "5"]) == 0
    assert "step_000004.jsonl" in names(run) and "step_000003.jsonl" not in names(run)
    assert removed_steps(run) == 4


def test_rescoring_says_what_is_missing(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.py").write_text("def one(trajectory):\n    return 1.0\n")
    assert main(["rescore", str(run), "--reward", "./one.py:one", "--out", "again"]) == 0
    assert "those of the 2 steps before were removed by" in capsys.readouterr().out


@pytest.mark.parametrize("count", [-3, 0])
def test_a_run_with_fewer_steps_removes_nothing(written, count):
    before = names(written.path)
    written.remove_steps(count)
    assert names(written.path) == before


@pytest.mark.parametrize("value", ["0", "-1", "al", "2.5", "none"])
def test_another_value_is_refused(value, capsys):
    assert main(["run", "--env", "calculator", "--keep-trajectories", value, "--dry-run"]) == 2
    assert "--keep-trajectories" in capsys.readouterr().err


def test_all_is_the_default():
    assert (
        resolve({"env": "calculator", "keep_trajectories": "all"}).settings == resolve({"env": "calculator"}).settings
    )
