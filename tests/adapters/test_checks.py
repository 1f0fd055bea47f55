"""`rollouts check` passes for environments of the adapters whose upstream package has many, and the packs have as many
names as the gallery says. The packages of the other adapters, of servers and of folders, have a test of their own,
`test_keeps_the_contract`.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollouts.plugins import PluginManager

ROOT = Path(__file__).parents[2]
GALLERY = runpy.run_path(str(ROOT / "scripts" / "gallery.py"))
NEEDS = {"gym": "minigrid", "reasoning_gym": "reasoning_gym", "textarena": "textarena", "textarena_self": "textarena"}
NEEDS |= {"browser_form": "playwright"}
CHECKED = [
    "gym/FrozenLake-v1",
    "gym/Taxi-v4",
    "gym/CartPole-v1",
    "gym/Blackjack-v1",
    "gym/MiniGrid-DoorKey-5x5-v0",
    "gym/BabyAI-GoToRedBall-v0",
    "reasoning_gym/basic_arithmetic",
    "reasoning_gym/chain_sum",
    "reasoning_gym/countdown",
    "reasoning_gym/graph_color",
    "reasoning_gym/leg_counting",
    "reasoning_gym/simple_equations",
    "reasoning_gym/spell_backward",
    "reasoning_gym/mini_sudoku",
    "textarena/TicTacToe-v0",
    "textarena/2048-v0",
    "textarena/GuessTheNumber-v0",
    "textarena/Nim-v0",
    "textarena_self/ConnectFour-v0",
    "textarena_self/TicTacToe-v0",
    "browser_form",
]


@pytest.mark.adapters
@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_keeps_the_contract(name):
    if find_spec(NEEDS[name.partition("/")[0]]) is None:
        pytest.skip(f"the upstream package of {name} is not installed; to run these tests: make test-adapters")
    if name == "browser_form" and shutil.which("chromium") is None:
        pytest.skip("there is no Chromium; `apt install chromium` brings it")
    command = [sys.executable, "-m", "rollouts", "check", name, "--skip", "wheel", "--tasks", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.adapters
@pytest.mark.parametrize("pack", GALLERY["packs"](), ids=lambda pack: pack["prefix"])
def test_a_pack_has_as_many_names_as_the_gallery_says(pack):
    missing = [module for module in pack["modules"] if find_spec(module) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed; to run these tests: make test-adapters")
    refs = [ref for ref in PluginManager().list("environments", hooks=True) if ref.name.startswith(pack["prefix"])]
    names = {ref.name for ref in refs}
    assert "count" not in pack or names >= set(pack["examples"])
    assert pack.get("count", len(names)) == len(names), (
        "change scripts/gallery_packs.toml, then: python scripts/gallery.py"
    )
