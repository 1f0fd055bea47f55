"""Commands find the files that settings name, whether they are typed in the folder of the settings or elsewhere."""

from __future__ import annotations

import io
import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.models.loading import TINY_PATH

JUDGE = """\
def short(trajectory, *, notes: str = ""):
    if notes:
        open(notes).close()
    return 1.0 / (1 + len(trajectory.last_text))
"""

SETTINGS = """\
data = "rows.jsonl"
model = "models/base"
out = "runs/mine"
eval_tasks = 2
prompts_per_step = 1
samples_per_prompt = 2
max_tokens = 4
max_turns = 1
steps = 1

[reward.short]
name = "./judge.py:short"
notes = "notes.txt"
"""


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with settings and their files, and a run that was begun in it."""
    proj = tmp_path_factory.mktemp("begun") / "proj"
    proj.mkdir()
    (proj / "judge.py").write_text(JUDGE)
    (proj / "notes.txt").touch()
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1), "response": str(n + 1)} for n in range(30)]
    (proj / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (proj / "run.toml").write_text(SETTINGS)
    (proj / "sft.toml").write_text('data = "rows.jsonl"\nmodel = "models/base"\nsteps = 1\nprompts_per_step = 2\n')
    shutil.copytree(TINY_PATH, proj / "models/base")
    before = Path.cwd()
    os.chdir(proj)
    try:
        assert main(["run", "run.toml", "--display", "none"]) == 0
    finally:
        os.chdir(before)
    return proj


@pytest.fixture
def proj(begun, tmp_path, monkeypatch):
    """A copy of that folder, as if the run was begun in it; the working directory is another one."""
    shutil.copytree(begun, tmp_path / "proj")
    manifest = tmp_path / "proj/runs/mine/manifest.json"
    manifest.write_text(manifest.read_text().replace(str(begun), str(tmp_path / "proj")))
    (tmp_path / "other/deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "other/deep")
    return Path("../../proj")


def trained(run):
    """What must not depend on the working directory."""
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in ("reward/mean", "policy/loss", "policy/entropy")} for line in lines]


@pytest.mark.slow
def test_a_run_begins_elsewhere(proj):
    shutil.rmtree(proj / "runs")
    assert main(["run", f"{proj}/run.toml", "--display", "none"]) == 0
    assert not list(Path().iterdir()), "`out` of the file is in the folder of the file"
    saved = tomllib.loads((proj / "runs/mine/config.toml").read_text())
    assert saved["reward"]["short"]["name"] == "../../proj/judge.py:short", "relative to where the run was begun"
    assert main(["resume", f"{proj}/runs/mine", "--steps", "2", "--display", "none"]) == 0
    os.chdir(proj)
    assert main(["resume", "runs/mine", "--steps", "3", "--display", "none"]) == 0
    assert len(trained("runs/mine")) == 3


def test_a_resumed_run_equals_one_that_was_resumed_where_it_was_begun(proj, capsys):
    shutil.copytree(proj, "../../proj2")
    before = tomllib.loads((proj / "runs/mine/config.toml").read_text())
    assert main(["resume", f"{proj}/runs/mine", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "note: steps: 1 -> 2\n" in out and out.count(" -> ") == 1, "only what was typed has changed"
    assert tomllib.loads((proj / "runs/mine/config.toml").read_text()) == before | {"steps": 2}
    os.chdir("../../proj2")
    for steps in ("2",):
        assert main(["resume", "runs/mine", "--steps", steps]) == 0
        assert capsys.readouterr().out.count(" -> ") == 1
    assert trained("runs/mine") == trained("../proj/runs/mine") and len(trained("runs/mine")) == 2


def test_an_unchanged_config_keeps_its_comments(proj):
    config = proj / "runs/mine/config.toml"
    config.write_text("# mine\n" + config.read_text())
    before = config.read_bytes()
    assert main(["resume", f"{proj}/runs/mine", "--checkpoint", "step_000001", "--display", "none"]) == 0
    assert config.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "rescore {}/runs/mine --out made",
        pytest.param("run --from {}/runs/mine --out made", marks=pytest.mark.nightly),
        "eval {}/runs/mine --out made",
        pytest.param("eval {}/run.toml --out made", marks=pytest.mark.nightly),
        "run {}/runs/mine/config.toml --out made",
        "sft {}/sft.toml --out made",
        pytest.param("sft {}/sft.toml --seeds 0,1 --out made", marks=pytest.mark.nightly),
        "run {}/run.toml --out made --dry-run",
        "config {}/run.toml",
        "data inspect {}/runs/mine",
        "export {}/runs/mine made",
    ],
)
def test_a_command_finds_the_files_of_the_settings(proj, capsys, command):
    assert main(command.format(proj).split()) == 0, capsys.readouterr().err
    assert Path("made").exists() == ("made" in command and "dry-run" not in command)


def test_a_conversation_finds_the_files_of_the_run(proj, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 1 + 1?\n"))
    assert main(["chat", f"{proj}/runs/mine"]) == 0
    assert "assistant: " in capsys.readouterr().out


def test_an_exported_model_brings_its_files(proj, monkeypatch):
    assert main(["export", f"{proj}/runs/mine", "made"]) == 0
    assert tomllib.loads(Path("made/rollouts.toml").read_text())["reward"]["short"]["name"] == "./judge.py:short"
    shutil.copy(proj / "judge.py", "made")
    shutil.copy(proj / "notes.txt", "made")
    rows = f"{proj}/rows.jsonl"
    assert main(["eval", "made/rollouts.toml", "--model", "made", "--data", rows, "--out", "evaluated"]) == 0
    manifest = json.loads(Path("evaluated/manifest.json").read_text())
    assert [file["path"] for file in manifest["files"]] == [os.path.abspath("made/judge.py")]


def test_a_flag_begins_at_the_working_directory(proj, capsys):
    assert main(["run", f"{proj}/run.toml", "--reward", "./judge.py:short", "--dry-run"]) == 2
    assert f"there is no file './judge.py' (the full path: {Path('judge.py').resolve()})" in capsys.readouterr().err


def test_a_missing_file_is_missed_at_the_folder_of_the_settings(proj, capsys):
    (proj / "judge.py").unlink()
    assert main(["run", f"{proj}/run.toml", "--dry-run"]) == 2
    assert "there is no file '../../proj/judge.py'" in capsys.readouterr().err
    (proj / "rows.jsonl").unlink()
    assert main(["run", f"{proj}/run.toml", "--reward", "env:1", "--dry-run"]) == 2
    assert "../../proj/rows.jsonl" in capsys.readouterr().err
