"""Every example runs in a small size, prints lines of the kind that its docstring shows, and is in the lists."""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import trio

import rollouts

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES_MAX = 80
SMALL = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 32}
"""What an example that calls `rollouts.run` does not set itself; it evaluates at most eight tasks."""
THE_LOOP_ON_ONE_PAGE = "grpo_by_hand.py"  # docs/a-run-in-one-page.md says how long it is


def docstring_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def first_words(text: str) -> set[str]:
    return {line.split()[0] for line in text.splitlines() if line.strip()}


def shown_by(path: Path) -> str:
    """The lines that the docstring says the example prints: its last indented block."""
    return re.split(r"\n\n(?=    )", docstring_of(path))[-1]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys) -> Callable[..., tuple[Any, list[str]]]:
    """run(name, steps=2) -> what `main` returned, and the lines that it printed."""

    plain = rollouts.run

    def run_small(**settings: Any) -> dict[str, Any]:
        return plain(**SMALL | settings | {"eval_tasks": min(settings.get("eval_tasks", 8), 8)})

    def run_example(name: str, **sizes: Any) -> tuple[Any, list[str]]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(rollouts, "run", run_small)
        path = ROOT / "examples" / f"{name}.py"
        main = runpy.run_path(str(path))["main"]
        returned = trio.run(main, *sizes.values()) if inspect.iscoroutinefunction(main) else main(**sizes)
        printed = capsys.readouterr().out
        assert first_words(printed) <= first_words(shown_by(path)), printed
        return returned, printed.splitlines()

    return run_example


def test_run_sft(run):
    history, lines = run("run_sft", steps=21)
    assert history[-1]["loss"] < history[0]["loss"] / 2 and "Step 20: " in lines[5]


def test_run_rl(run):
    history, lines = run("run_rl", steps=2)
    assert [metrics["step"] for metrics in history] == [0, 1] and lines[-2] == "Total steps: 2"
    assert 0 < history[1]["mean_reward"] < 1


def test_own_environment(run):
    summary, _ = run("own_environment", steps=1)
    assert summary["evaluation"]["before"]["parts"].keys() == {"correct"}


def test_own_loss(run):
    _, lines = run("own_loss", steps=2)
    assert len(lines) == 2 and not lines[0].endswith(" 0.00")  # the second minibatch has another policy


def test_vector_rewards(run):
    summary, _ = run("vector_rewards", steps=1)
    assert summary["evaluation"]["after"]["parts"].keys() == {"correct", "brevity", "used_tool"}


def test_algorithm_switching(run):
    _, lines = run("algorithm_switching", steps=3)
    assert [line.split("reward")[0].split(maxsplit=2)[2].strip() for line in lines] == ["grpo + KL", "grpo", "cispo"]
    assert [line.split()[-1] for line in lines] == ["0.2", "-", "-"]


def test_tool_call_tracking(run):
    _, lines = run("tool_call_tracking", steps=1)
    assert "metric/unanswered" in lines[0]
    calls = float(re.search(r"rollout/tool_calls ([\d.]+)", lines[0])[1])
    assert calls > 0


@pytest.mark.slow
def test_kl_moving_reference(run):
    measured, lines = run("kl_moving_reference", steps=4)
    assert len(lines) == 8
    assert measured["frozen"][0] == measured["follow"][0] == pytest.approx(0, abs=1e-9)
    assert measured["follow"][:2] == measured["frozen"][:2]  # it moves after the second step
    assert measured["follow"][-1] < measured["frozen"][-1]


def test_training_with_metrics(run):
    history, lines = run("training_with_metrics", steps=22)
    assert history[-1]["policy/loss"] < history[0]["policy/loss"]
    assert [line.split()[:2] for line in lines[:2]] == [["step", "0"], ["step", "20"]]


def test_sft_pipeline_example(run):
    losses, _ = run("sft_pipeline_example", steps=12)
    assert losses[-1] < losses[0] / 2


def test_rollout_generation(run):
    (batch,), _ = run("rollout_generation", steps=1)
    assert 0 < len(batch.tokens) <= 12 and all(length > 0 for length in batch.response_lengths)
    for start in range(0, len(batch.rewards), 3):
        assert len(set(batch.rewards[start : start + 3])) > 1  # other groups were dropped


@pytest.mark.slow
def test_offline_rft(run):
    (before, after), lines = run("offline_rft", steps=6, tasks=16)
    assert math.isfinite(after) and after > before
    assert lines[0].startswith("sampled 128 rollouts")


def test_evaluate_an_api(run, monkeypatch):
    """Its server is a fork. Other commands, such as those that name the machine, are started as ever."""
    plain = subprocess.Popen

    @contextlib.contextmanager
    def fork(command, **settings):
        process = forks.popen(command, **settings)
        yield process
        process.stdout.close()
        process.wait(60)

    def start(command, *more, **settings):
        return fork(command, **settings) if "serve" in command else plain(command, *more, **settings)

    monkeypatch.setattr(subprocess, "Popen", start)
    summary, _ = run("evaluate_an_api", tasks=4)
    assert summary["episodes"] == summary["judged"] == 16 and summary["url"].startswith("http://127.0.0.1:")


@pytest.mark.slow
def test_own_reward_package(run):
    pytest.importorskip("hatchling")
    summary, _ = run("own_reward_package", steps=1)
    assert summary["evaluation"]["after"]["weights"] == {"correct": 1.0, "short": -0.1}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LINES_MAX or path.name == THE_LOOP_ON_ONE_PAGE, f"{lines} lines"
    assert f"    python examples/{path.name}" in docstring_of(path)


@pytest.mark.parametrize("page", ["examples/README.md", "docs/examples.md"])
def test_the_lists_have_every_example_once(page):
    listed = re.findall(r"`(\w+\.py)`", (ROOT / page).read_text(encoding="utf-8"))
    assert sorted(listed) == [path.name for path in EXAMPLES]


def test_every_example_is_run():
    """By a test of this module or of another one."""
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "plugins" / "notes" / "tests").rglob("test_*.py")]
    tests = "".join(path.read_text(encoding="utf-8") for path in files)
    stems = [path.stem.removeprefix("primitives_") for path in EXAMPLES]  # primitives/test_programs.py runs those
    assert [stem for stem in stems if f'"{stem}"' not in tests and f"{stem}.py" not in tests] == []
