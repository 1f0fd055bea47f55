"""The commands of docs/mixing-rewards.md run, with packages of three authors, and the script draws what each earned."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mixing-rewards.md").read_text(encoding="utf-8")
SMALL = "--steps 2 --prompts-per-step 2 --samples-per-prompt 2 --eval-tasks 4 --max-tokens 64"

pytestmark = pytest.mark.slow


def test_rewards_of_three_packages_are_mixed_and_drawn(rollouts, tmp_path):
    pytest.importorskip("rapidfuzz", reason="rapidfuzz is not installed; type pip install rapidfuzz==3.14.6")
    made = rollouts("new", "reward", "brevity")
    assert made.returncode == 0, made.stderr
    source = (tmp_path / "brevity" / "rollouts_brevity" / "__init__.py").read_text()
    (shown,) = re.findall(r"```python\n.*?(def brevity.*?)```", PAGE, re.DOTALL)
    assert shown in source
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", "site", "./brevity"]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    lines = PAGE.replace("\\\n", " ").splitlines()
    commands = [line.replace("--steps 60", SMALL) for line in lines if line.startswith("rollouts run")]
    trained = [command for command in commands if "judge" not in command]
    assert len(trained) == 2 and len(commands) == 3
    for command, more in zip(trained, ((), ("--dry-run",)), strict=True):
        done = rollouts(*shlex.split(command)[1:], *more, path=(tmp_path / "site",))
        assert done.returncode == 0, done.stdout + done.stderr
    assert 'name = "product"' in done.stdout
    weights = json.loads((tmp_path / "runs/sum/summary.json").read_text())["evaluation"]["after"]["weights"]
    assert weights == {"correct": 1.0, "novelty": 0.2, "brevity": 0.2}
    draw = runpy.run_path(str(ROOT / "scripts" / "learning_curve.py"))["main"]
    draw(["--parts", str(tmp_path / "runs/sum"), "--out", str(tmp_path / "parts.svg")])
    assert "0.2 × novelty</text>" in (tmp_path / "parts.svg").read_text(encoding="utf-8")
