"""Benchmarks that can run dry: `benchmarks/gpu.py` on a CPU, with tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow]


def measure(*arguments):
    """The exit code, and the figures of the last line."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments, "--scale", "dry"]
    command += ["--warmup", "1", "--steps", "1", "--blocks", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_a_dry_run_measures_each_part(tmp_path):
    file = tmp_path / "figures.json"
    code, figures, printed = measure(
        *("kernels", "train", "grpo", "generate", "job", "--only", "no checkpointing", "--json", str(file))
    )
    assert code == 0, printed
    assert json.loads(file.read_text()) == figures
    assert figures["device"] == "cpu" and figures["scale"] == "dry"
    assert list(figures["parts"]) == ["kernels", "train", "grpo", "generate", "job"]
    for part in figures["parts"].values():
        assert part["figures"] and "error" not in part, printed
    for part, variants in (("train", 3), ("grpo", 4)):
        rows = figures["parts"][part]["figures"]
        assert [row["side"] for row in rows] == ["ours", "limit"] * variants
        assert all(row["tokens_per_second"] > 0 for row in rows)
        assert all(row["of_limit"] > 0 for row in rows[::2])
    assert figures["parts"]["generate"]["figures"][-1]["max_nats"] < 1e-5


def test_a_part_that_fails_leaves_the_others(tmp_path):
    (tmp_path / "dry").mkdir()
    (tmp_path / "dry" / "config.json").write_text("{}")  # no model
    code, figures, printed = measure("generate", "long", "--folder", str(tmp_path))
    assert code == 1, printed
    assert all(part["error"] for part in figures["parts"].values()) and len(figures["parts"]) == 2, printed
