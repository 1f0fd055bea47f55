from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from rollouts_gsm8k import GSM8K, last_number

from rollouts.check import check_environment_class
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, Trajectory

ROWS = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(10)]


@pytest.mark.parametrize(
    "only", [["settings", "oracle"], pytest.param([], marks=pytest.mark.nightly)], ids=["quick", "all"]
)
def test_the_contract(only: list[str]) -> None:
    check_environment_class(GSM8K, tasks=1, only=only, skip=["wheel", "imports"])


def test_the_sample_has_right_answers() -> None:
    env = GSM8K()
    assert (len(env.tasks("train", random.Random(0))), len(env.tasks("eval", random.Random(0)))) == (24, 6)
    for split in ("train", "eval"):
        for task, talk in zip(
            env.tasks(split, random.Random(0)), env.demonstrations(split, random.Random(0)), strict=True
        ):
            assert env.correct(task, Trajectory(task, talk)) == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [("#### 42", 42.0), ("1,250 dollars", 1250.0), ("it is -3.5", -3.5), ("3 or 4.", 4.0), ("none", None), ("", None)],
)
def test_the_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number
    task = Task("How many?", answer=42.0)
    assert GSM8K().correct(task, Trajectory(task, [Message("assistant", text)])) == float(number == 42.0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        pytest.importorskip("pandas").DataFrame(ROWS).to_parquet(path)
    env = GSM8K(source=str(path), instruction="")
    assert [task.prompt for task in env.tasks("eval", random.Random(0))] == ["What is 0 + 1?", "What is 5 + 1?"]
    assert len(env.tasks("train", random.Random(0))) == 8


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "a", "solution": "b"}, "row 0 has no text 'answer'; it has question, solution"),
        ({"question": "a", "answer": "b"}, "the answer of row 0 has no number"),
    ],
)
def test_rows_of_another_format(tmp_path: Path, row: dict[str, str], words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(row) + "\n") * 3)
    with pytest.raises(ConfigError, match=words):
        GSM8K(source=str(path)).tasks("train", random.Random(0))


@pytest.mark.parametrize("source", ["no_file.jsonl", "no/such-data-set"])
def test_what_does_not_exist(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=f"--env.source {source}: "):
        GSM8K(source=source).tasks("train", random.Random(0))
