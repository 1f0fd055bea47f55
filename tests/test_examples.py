"""The examples run, and do what they say."""

from __future__ import annotations

import runpy
import textwrap
from pathlib import Path

import pytest
import trio

ROOT = Path(__file__).parents[1]
BY_HAND = ROOT / "examples" / "grpo_by_hand.py"


@pytest.mark.slow
def test_a_run_by_hand_learns(capsys):
    """Twelve steps take the calculator agent from hardly ever to mostly."""
    main = runpy.run_path(str(BY_HAND))["main"]
    score = trio.run(main, 12, 0, 16)
    rewards = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
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
