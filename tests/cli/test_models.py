"""`rollouts eval --model A --model B`: an evaluation of each model on the same tasks, and a table to compare them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from rollouts.cli import main
from rollouts.runs import several
from rollouts.runs.comparing import rewards_by_task

EVAL = ["eval", "--env", "calculator", "--eval-tasks", "6", "--max-tokens", "12"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Commands run in this process, which spares the import of torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(several, "run_child", lambda arguments, variables: main(list(arguments)))
    return tmp_path


@pytest.fixture
def trained(here, made_run):
    """A run of one step, whose seed and held-out tasks are its own."""
    short = "--steps 1 --prompts-per-step 1 --samples-per-prompt 2 --eval-tasks 3 --max-tokens 8 --seed 5".split()
    made_run(["run", "--env", "calculator", *short], "runs/first")
    return "runs/first"


def tasks_of(folder):
    lines = (Path(folder) / "trajectories" / "eval.jsonl").read_text().splitlines()
    return [json.loads(line)["task"]["prompt"] for line in lines]


def test_each_is_a_single_evaluation_of_the_same_tasks(here, trained, capsys):
    assert main([*EVAL, "--model", "tiny", "--model", trained, "--out", "table"]) == 0
    out = capsys.readouterr().out
    assert "--- tiny (1 of 2): table/tiny" in out and "--- runs/first (2 of 2): table/first" in out
    assert tasks_of("table/tiny") == tasks_of("table/first") and len(tasks_of("table/first")) == 6
    assert main([*EVAL, "--model", "tiny", "--out", "alone"]) == 0
    alone, own = (json.loads(Path(folder, "summary.json").read_text()) for folder in ("alone", "table/tiny"))
    assert alone["reward_mean"] == own["reward_mean"] and tasks_of("alone") == tasks_of("table/tiny")
    summaries = [json.loads(Path("table", name, "summary.json").read_text()) for name in ("tiny", "first")]
    table = out[out.index("\nmodel ") :].splitlines()[1:]
    shown = [line.split()[:2] for line in table[1:3]]
    assert sorted(float(reward) for _, reward in shown) == sorted(round(each["reward_mean"], 3) for each in summaries)
    assert float(shown[0][1]) >= float(shown[1][1]), "the best is first"
    assert f"{shown[1][0]} against {shown[0][0]}: no difference shown" in out


def test_the_first_model_decides_on_the_tasks(here, trained, monkeypatch):
    asked = []
    monkeypatch.setattr(several, "run_child", lambda arguments, variables: asked.append(arguments) or 0)
    own = ["eval", "--env", "calculator", "--max-tokens", "8"]
    assert main([*own, "--model", trained, "--model", "tiny", "--out", "table"]) == 0
    assert [line[-4:] for line in asked] == [
        ["--seed=5", "--eval-tasks=3", f"--model={model}", f"--out=table/{name}"]
        for model, name in ((trained, "first"), ("tiny", "tiny"))
    ]


def test_a_model_that_fails_stops_no_other_and_is_tried_again(here, monkeypatch, capsys):
    asked, codes = [], {"b": 1}

    def command(arguments, variables):
        asked.append(list(arguments))
        name = next((each.partition("=")[2] for each in arguments if each.startswith("--model=")), "resumed")
        return codes.get(name, 0)

    monkeypatch.setattr(several, "run_child", command)
    models = ["--model", "a", "--model", "b", "--model", "c"]
    assert main([*EVAL, *models, "--out", "table"]) == 1
    assert "these did not end as they should: b; try them again with: rollouts resume table" in capsys.readouterr().err
    assert [each[-2:] for each in asked] == [[f"--model={name}", f"--out=table/{name}"] for name in "abc"]
    (here / "table" / "a").mkdir()
    (here / "table" / "a" / "summary.json").write_text('{"status": "done", "failed": {}, "episodes_asked": 6}')
    (here / "table" / "b").mkdir()
    (here / "table" / "b" / "config.toml").write_text("mode = 'eval'")
    asked.clear(), codes.clear()
    assert main(["resume", "table"]) == 0
    assert asked[0] == ["resume", "table/b"] and len(asked) == 2
    assert main([*EVAL, *models, "--out", "table"]) == 0, "the same command again goes on as well"
    assert main([*EVAL, "--model", "a", "--model", "d", "--out", "table"]) == 2
    assert "has the runs of another command" in capsys.readouterr().err


def test_an_interrupt_ends_all(here, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(several, "run_child", lambda arguments, variables: asked.append(arguments) or 130)
    assert main([*EVAL, "--model", "a", "--model", "b", "--out", "table"]) == 130
    assert len(asked) == 1 and "continue with: rollouts resume table" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*EVAL, "--model", "tiny", "--model", "tiny"], "--model tiny is given twice"),
        ([*EVAL, "--model", "nowhere/x", "--model", "tiny"], "nowhere/x was refused"),
        ([*EVAL, "--model", "tiny", "--model", "b", "--lr", "1"], "--lr"),
    ],
)
def test_mistakes_leave_nothing_behind(arguments, words, here, capsys):
    assert main([*arguments, "--out", "out"]) == 2
    assert words in capsys.readouterr().err and not Path("out").exists()


def test_a_dry_run_checks_each(here, trained, monkeypatch, capsys):
    checked = []

    def dry_run(resolved):
        checked.append((resolved.settings.model, resolved.settings.seed, resolved.settings.eval_tasks))
        return "settings\nok: everything was checked"

    monkeypatch.setattr("rollouts.runs.dry_run.dry_run", dry_run)
    assert main([*EVAL, "--model", "tiny", "--model", trained, "--out", "out", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out == "settings\nok: everything was checked\n\nruns/first: ok: everything was checked\n"
    assert checked == [("tiny", 0, 6), ("runs/first", 0, 6)] and not Path("out").exists()


def test_resuming_keeps_the_settings(here, capsys):
    Path("table").mkdir()
    Path("table/models.json").write_text('{"command": ["eval"], "models": {"tiny": "tiny"}}')
    assert main(["resume", "table", "--steps", "3"]) == 2
    assert "which keep their settings" in capsys.readouterr().err
    Path("table/models.json").write_text("{")
    assert main(["resume", "table"]) == 2
    assert "models.json cannot be read" in capsys.readouterr().err


def test_samples_of_a_task_are_reduced_in_each_table(here, trained, capsys):
    own = ["eval", "--env", "calculator", "--env.digits", "1", "--eval-tasks", "5", "--max-tokens", "16"]
    own += ["--samples-per-prompt", "4", "--reduce", "majority", "--answer-pattern", r"-?\d+"]
    assert main([*own, "--model", "tiny", "--model", trained, "--out", "table"]) == 0
    out = capsys.readouterr().out
    assert "reward, majority of 4" in out and out.count("majority of 4") == 4 and "pass^4" in out
    for name in ("tiny", "first"):
        summary = json.loads(Path("table", name, "summary.json").read_text())
        tasks: dict[int, list[tuple[float, str]]] = {}
        for line in map(json.loads, Path("table", name, "trajectories", "eval.jsonl").read_text().splitlines()):
            said = [each.get("content", "") for each in line["messages"] if each["role"] == "assistant"]
            answer = (re.findall(r"-?\d+", said[-1]) or [""])[-1]
            tasks.setdefault(line["group"], []).append((line["reward"], answer))
        values = []
        for samples in tasks.values():
            votes = [answer for _, answer in samples if answer] or [""]
            winner = max(votes, key=votes.count)
            values.append(fmean([reward for reward, answer in samples if answer == winner]))
        assert summary["reduce"] == "majority" and summary["reduced_mean"] == pytest.approx(fmean(values))
        by_task = rewards_by_task(Path("table", name))
        assert sorted(by_task.values()) == pytest.approx(sorted(values))
    assert main(["runs", "compare", "table/tiny", "table/first"]) == 0
    shown = capsys.readouterr().out
    assert f"{summary['reduced_mean']:.3f} ± {summary['reduced_stderr']:.3f}" in shown and "majority" in shown
    assert main(["runs", "compare", "table/tiny", "table/first", "--reduce", "best"]) == 0
    best = fmean([max(reward for reward, _ in samples) for samples in tasks.values()])
    assert f"{best:.3f}" in capsys.readouterr().out
    assert main(["eval", *own[1:7], "--model", "tiny", "--out", "alone", "--max-tokens", "4"]) == 0
    capsys.readouterr()
    assert main(["runs", "compare", "table/tiny", "alone"]) == 2
    err = capsys.readouterr().err
    assert "to their majority of the answers" in err and "alone to their mean" in err and "type: --reduce mean" in err
    assert main(["runs", "compare", "table/tiny", "alone", "--reduce", "bets"]) == 2
    assert "did you mean: best?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "--answer-pattern", "("], "--answer-pattern: '(' is no regular expression"),
        (["eval", "--reduce", "bests"], "best"),
        (["run", "--reduce", "best"], "evaluations with several samples of each task"),
        (["run", "--answer-pattern", "x"], "leave it out, or type: rollouts eval"),
    ],
)
def test_mistakes_of_reducing(arguments, words, here, capsys):
    assert main([*arguments, "--env", "calculator", "--dry-run"]) == 2
    assert words in capsys.readouterr().err
