"""The folder of a run is given where a model goes: its newest checkpoint is used, and its shape decides on the rate."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import rollouts
from rollouts.cli import main
from rollouts.errors import ConfigError
from rollouts.models.loading import TINY_PATH, bundled
from rollouts.runs.earlier_run import find_checkpoint, is_of_run
from rollouts.runs.jobs.evaluate import model_name

sys.path.insert(0, str(Path(__file__).parent))
from composing import plan

SMALL = {"env": "calculator", "steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 8}
ADAPTER = '{"base_model_name_or_path": "tiny"}'


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the run `first`, whose checkpoints have the shape of tiny and hold no weights."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 12):
        folder = Path(f"first/checkpoints/step_{step:06d}")
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes((TINY_PATH / "config.json").read_bytes())
        (folder / "manifest.json").touch()
    Path("first/config.toml").write_text('env = "calculator"\n')
    return tmp_path


@pytest.mark.parametrize(
    ("model", "name"), [("ada/base", "base"), ("runs/a/checkpoints/step_000003", "a-step_000003"), ("tiny", "tiny")]
)
def test_the_folder_of_an_evaluation_has_the_name_of_the_model(model, name):
    assert model_name(model) == name


@pytest.mark.parametrize("name", ["model", "critic", "teacher"])
def test_a_folder_of_a_run_is_its_newest_checkpoint(here, name):
    loss = {"model": "grpo", "critic": "ppo", "teacher": "opd"}[name]
    made = plan(loss=loss, **{name: "first"})
    assert getattr(made.settings, name) == "first/checkpoints/step_000012"
    flag = "" if name == "model" else f"--{name} "
    assert f"{flag}first is a run's folder: its newest checkpoint is used, step_000012" in made.notes
    if name != "model":
        assert getattr(made.auxiliary_models, name) == "first/checkpoints/step_000012"
    assert f'{name} = "first/checkpoints/step_000012"' in made.config, "running it again means the same model"


def test_settings_of_a_run_that_cannot_be_read_are_a_note(here):
    Path("first/config.toml").write_text("seed =")
    (note,) = (each for each in plan(model="first").notes if "cannot be read" in each)
    assert note.startswith("--model first: the settings of its run cannot be read: ")


@pytest.mark.parametrize("command", ["eval {}", "chat {}", "serve {}", "export {} out", "resume {}"])
def test_a_missing_checkpoint_names_its_neighbors(here, capsys, command):
    words = command.format("first/checkpoints/step_000007").split()
    assert main(words) == 2
    near = "the nearest checkpoints: first/checkpoints/step_000001, first/checkpoints/step_000012"
    assert near in capsys.readouterr().err


def test_a_model_is_no_folder_of_a_run(here):
    Path("merged").mkdir()
    Path("merged/config.json").touch()
    assert not any(map(is_of_run, ("", "tiny", "merged", "lost", ".", "first/checkpoints/step_000012")))
    assert is_of_run("first") and is_of_run("first/checkpoints")


@pytest.mark.parametrize("lora_rank, lr", [(0, 3e-4), (4, 3e-3)])
def test_what_descends_from_tiny_has_its_rate(here, lora_rank, lr):
    assert plan(model="first", lora_rank=lora_rank).lr == pytest.approx(lr)
    adapter = Path("adapter")
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(ADAPTER)
    assert plan(model="adapter", lora_rank=lora_rank).lr == pytest.approx(lr)
    other = json.loads((TINY_PATH / "config.json").read_text()) | {"hidden_size": 256}
    (here / "first/checkpoints/step_000012/config.json").write_text(json.dumps(other))
    assert plan(model="first", lora_rank=lora_rank).lr == pytest.approx(1e-6 * (10 if lora_rank else 1))


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_config_that_cannot_be_read_is_no_bundled_model(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert bundled(str(tmp_path)) is None and bundled("lost/model") is None and bundled("./lost") is None


def test_a_run_begins_where_another_one_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rollouts.run(mode="sft", eval_tasks=0, out="sft", **{k: v for k, v in SMALL.items() if k != "samples_per_prompt"})
    summary = rollouts.run(**SMALL, model="sft", lora_rank=2, eval_tasks=2, out="rl")
    assert summary["status"] == "done"
    assert main(["eval", "rl", "--max-tokens", "8", "--samples-per-prompt", "1", "--out", "evaluated"]) == 0
    assert json.loads(Path("evaluated/summary.json").read_text())["model"] == "rl/checkpoints/step_000001"
    out = capsys.readouterr().out
    assert "note: rl is a run's folder: its newest checkpoint is used, step_000001" in out
    with pytest.raises(ConfigError, match=r"folder of an evaluation, which writes no model; give .* rl/check"):
        find_checkpoint("evaluated")


def test_a_folder_that_is_given_as_a_file_of_settings(here, capsys):
    for folder, words in (
        ("first", "to continue the run in it: rollouts resume first\nto repeat that run: rollouts run first/config"),
        ("first", "to begin a new run with its model: --model first\n"),
        ("first/checkpoints/step_000012", "to begin a new run with its model: --model first/checkpoints/step_000012\n"),
        ("first", "to evaluate its model: rollouts eval first\n"),
        ("first/checkpoints/step_000012", "rollouts eval --env NAME --model first/checkpoints/step_000012\n"),
        (".", "error: . is a folder; a settings file ends in .toml, .json, .py\ndid you mean: first?\n"),
    ):
        assert main(["run", folder]) == 2
        assert words in capsys.readouterr().err


def test_a_folder_with_runs_names_them(here, capsys):
    for command in (
        ["eval", "."],
        ["export", ".", "out"],
        ["eval", "--env", "calculator", "--model", "."],
        ["run", "--env", "calculator", "--model", "."],
    ):
        assert main(command) == 2
        assert capsys.readouterr().err.endswith(" first?\n"), command


def test_a_checkpoint_is_evaluated_with_the_settings_of_its_run(here, capsys):
    shutil.copytree(TINY_PATH, "first/checkpoints/step_000001", dirs_exist_ok=True)
    assert main(["eval", "first/checkpoints/step_000001", "--dry-run"]) == 0
    assert "first/checkpoints/step_000001" in capsys.readouterr().out


@pytest.mark.parametrize("reward, noted", [(["./r.py:brevity:-0.1"], True), (["env:1", "./r.py:brevity:-0.1"], False)])
def test_a_reward_that_replaces_the_environments_own_is_noted(here, reward, noted):
    Path("r.py").write_text("def brevity(trajectory):\n    return 1.0\n")
    note = "--reward brevity replaces the environment's own reward (correct); to keep it, add --reward env:1"
    assert (note in plan(reward=reward).notes) is noted
