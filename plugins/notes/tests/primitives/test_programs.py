"""The programs of primitives in examples/ run, and the calculator is learned."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[4] / "examples"


def main_of(name):
    return runpy.run_path(str(EXAMPLES / f"primitives_{name}.py"))["main"]


@pytest.mark.nightly
def test_the_calculator_is_learned():
    assert main_of("calculator")(20, 1) > 0.8


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("primitives_*.py")), ids=lambda path: path.stem)
def test_programs_are_short_and_say_how_to_run_them(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    assert f"python examples/{path.name}" in text.partition("import ")[0]
    assert f"`{path.name}`" in (EXAMPLES / "README.md").read_text()


def test_the_grpo_loop(capsys):
    rewards = main_of("grpo_loop")(2)
    assert len(rewards) == 2 and rewards[0] > 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.nightly
def test_vector_rewards(capsys):
    means = main_of("vector_rewards")(1)
    assert set(means) == {"correct", "used_tool", "brevity"} and means["used_tool"] > 0
    assert capsys.readouterr().out.startswith("iteration  0  reward 0.")


@pytest.mark.nightly
def test_algorithm_switching(capsys):
    assert main_of("algorithm_switching")(3).iteration == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["grpo", "grpo", "dapo"]


@pytest.mark.nightly
def test_tool_tracking(capsys):
    rollouts = main_of("tool_tracking")(6)
    assert sum(rollout.metadata["calls"] for rollout in rollouts) > 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("6 conversations: ")


@pytest.mark.nightly
def test_custom_kl():
    moving, fixed = main_of("custom_kl")(2)
    assert moving > 0 and fixed != 0


def test_the_custom_pipeline_continues(tmp_path, capsys):
    main, folder = main_of("custom_pipeline"), str(tmp_path / "checkpoints")
    assert main(1, folder).iteration == 1
    assert main(2, folder).iteration == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["iteration 0", "iteration 1"]
    assert all("eval/held_out" in line for line in lines)
