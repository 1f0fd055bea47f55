"""The SFT program of note 003 runs where only the wheel is installed, in a new virtual environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from note_blocks import block

ROOT = Path(__file__).parents[4]
OFFLINE = ("--no-index", "--no-deps", "--disable-pip-version-check", "-q")

BEFORE = """
import rollouts
from rollouts.training import create_cross_entropy_loss, load_hf_model
from rollouts.training.models import load_tokenizer
compute_loss = create_cross_entropy_loss()
print(rollouts.__file__)
"""


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_the_sft_program_runs_from_the_wheel(tmp_path):
    pytest.importorskip("hatchling")
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", *OFFLINE, "--no-build-isolation", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", *OFFLINE, wheel)
    # torch and the other dependencies are those of this interpreter: a path in a .pth file reads no other .pth file,
    # so an editable install of the repository stays out.
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")

    changes = {
        "tokenizer = ...  # Load your tokenizer": "tokenizer = load_tokenizer('tiny')",
        "model = ...  # Your model": "model = load_hf_model('tiny', device='cpu')",
        '"/tmp/sft_checkpoints"': repr(str(tmp_path / "checkpoints")),
        "num_steps=1000": "num_steps=2",
        "log_every=100": "log_every=1",
        "checkpoint_every=500": "checkpoint_every=2",
        "sys.path.insert(0, str(Path(__file__).parent.parent))": BEFORE,
    }
    program = tmp_path / "examples" / "run_sft.py"
    program.parent.mkdir()
    program.write_text(block("003/run_sft", changes))
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    out = run(python, program, cwd=program.parent, env=kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    assert out.startswith(str(site)), out
    assert "Step 1: loss=" in out and "  Total steps: 2\n" in out
    assert (tmp_path / "checkpoints" / "step_000002" / "config.json").is_file()
