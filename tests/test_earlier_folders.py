"""Folders that an earlier version has left resume, evaluate, export and run, and give the numbers that it gave.

`earlier/runs.tar.xz` holds five run folders as that version wrote them, each with a checkpoint after two steps:

    rollouts run ... --loss grpo --training.optimizer sgd --out full
    rollouts run ... --loss grpo --loss.clip-high 0.28 --minibatches 2 --lora-rank 2 --over-sampling 2 --staleness 1
        --filter nonzero_std --kl k3_loss --reward env:1 --out adapter
    rollouts sft --env calculator --prompts-per-step 4 --eval-tasks 4 --lora-rank 2 --out sft
    rollouts run ... --mode sft+rl --sft.steps 2 --lora-rank 2 --out both
    rollouts eval --env calculator --eval-tasks 4 --model full --out eval

`...` is `--env calculator --steps 2 --prompts-per-step 2 --samples-per-prompt 4 --eval-tasks 4 --checkpoint-every 2
--max-tokens 24`. `earlier/expected.json` holds what that version measured in the first step and, resumed, in the third.
"""

from __future__ import annotations

import json
import math
import shutil
import tarfile
from pathlib import Path

import pytest

from rollouts.cli import main

EARLIER = Path(__file__).parent / "earlier"
EXPECTED = json.loads((EARLIER / "expected.json").read_text())


@pytest.fixture(scope="module")
def extracted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extracted")
    with tarfile.open(EARLIER / "runs.tar.xz") as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4
    return folder


@pytest.fixture
def runs(extracted, tmp_path, monkeypatch):
    shutil.copytree(extracted, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def loop_of(folder: Path, step: int) -> dict[str, list[int]]:
    """What the checkpoint of this step keeps of the training loop."""
    return json.loads((folder / f"checkpoints/step_{step:06d}/state.json").read_text())["run"]["loop"]


def check(row: dict[str, float], wanted: dict[str, float], folder: str) -> None:
    """`adapter` samples ahead of its weights, so that the clock has a part in what it plays: not its numbers then."""
    assert len(wanted) > 2 and all(math.isfinite(row[name]) for name in wanted)
    if folder == "adapter":
        wanted = {name: wanted[name] for name in ("optim/lr", "sync/version")}
    assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(
    "folder", ["full", "both", *(pytest.param(each, marks=pytest.mark.slow) for each in ("adapter", "sft"))]
)
def test_it_resumes_with_the_numbers_of_then(runs, folder):
    assert main(["resume", folder, "--steps", "3"]) == 0
    name = "both/rl" if folder == "both" else folder
    rows = metrics(runs / name)
    assert [row["step"] for row in rows] == [0, 1, 2]
    check(rows[2], EXPECTED[name]["resumed"], folder)
    summary = json.loads((runs / name / "summary.json").read_text())
    if folder != "sft":  # the versions at the beginning of each step, which an earlier version named `begun_with`
        before, after = (loop_of(runs / name, step) for step in (2, 3))
        assert before["begun_with"] and after["start_versions"][:-1] == before["begun_with"]
    if folder != "adapter":
        for when, expected in EXPECTED[name]["evaluation"].items():  # which had no metrics and no weights of rewards
            assert expected.items() <= summary["evaluation"][when].items()


@pytest.mark.parametrize("folder", ["full", pytest.param("adapter", marks=pytest.mark.nightly)])
def test_its_settings_file_runs_again_with_the_numbers_of_then(runs, folder):
    assert main(["run", f"{folder}/config.toml", "--out", "again"]) == 0
    check(metrics(runs / "again")[0], EXPECTED[folder]["first"], folder)


@pytest.mark.parametrize(
    "folder", ["adapter", "both", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("full", "sft"))]
)
def test_its_model_is_evaluated_and_exported(runs, folder, capsys):
    name = "both/rl" if folder == "both" else folder
    assert main(["eval", "--env", "calculator", "--eval-tasks", "4", "--model", name, "--out", "found"]) == 0
    summary = json.loads((runs / "found" / "summary.json").read_text())
    assert summary["status"] == "done" and summary["judged"] == 4
    assert main(["export", name, "model"]) == 0
    assert (runs / "model" / "model.safetensors").is_file() and (runs / "model" / "tokenizer.json").is_file()


def test_an_evaluation_is_repeated_from_its_settings_file(runs):
    assert main(["eval", "eval/config.toml", "--out", "again"]) == 0
    before, after = (json.loads((runs / name / "summary.json").read_text()) for name in ("eval", "again"))
    assert after["reward_mean"] == before["reward_mean"] and after["tokens"] == before["tokens"]
