"""The examples run, and do what they say."""

from __future__ import annotations

import runpy
import textwrap
from pathlib import Path

import pytest
import trio

ROOT = Path(__file__).parents[1]
BY_HAND = ROOT / "examples" / "grpo_by_hand.py"


def by_hand(capsys, steps, tasks):
    """The score on so many tasks after a run by hand, and the reward of each step."""
    score = trio.run(runpy.run_path(str(BY_HAND))["main"], steps, 0, tasks)
    lines = capsys.readouterr().out.splitlines()
    return score, [float(line.split()[3]) for line in lines if line.startswith("step")]


def test_a_run_by_hand(capsys):
    score, rewards = by_hand(capsys, 2, 4)
    assert len(rewards) == 2 and all(0 <= value <= 1 for value in (score, *rewards))


@pytest.mark.nightly
def test_a_run_by_hand_learns(capsys):
    """Twelve steps take the calculator agent from hardly ever to mostly."""
    score, rewards = by_hand(capsys, 12, 16)
    assert rewards[0] < 0.3 < 0.6 < rewards[-1]
    assert score > 0.5


@pytest.mark.parametrize("begin", ["for step in range(steps):", "    # 3. Take one gradient step."])
def test_the_page_shows_the_example_s_own_lines(begin):
    page = (ROOT / "docs" / "a-run-in-one-page.md").read_text()
    block = next(block for block in page.split("```") if begin in block)
    lines = textwrap.dedent("".join(block.partition(begin)[1:])).splitlines()
    code = [line.strip() for line in BY_HAND.read_text().splitlines()]
    assert len(lines) > 5
    assert [line for line in lines if line.strip() not in code] == []
