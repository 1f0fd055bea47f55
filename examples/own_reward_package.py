"""Your own reward as a package: one module and one pyproject.toml. After `pip install`, `--reward` finds it by name.

    pip install hatchling
    python examples/own_reward_package.py               # half a minute on a laptop's CPU, offline
    python examples/own_reward_package.py --steps 2

The example writes the package into a folder, installs it beside itself instead of into your environment, and trains
with it. The entry point is all that makes the function known. It prints:

    before correct 0.28  short 0.29
    after  correct 0.95  short 0.99
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import rollouts

MODULE = '''
def brevity(trajectory, *, target_tokens: int = 10) -> float:
    """Tokens beyond the target, in targets.

    Args:
        target_tokens: as many are free
    """
    return max(trajectory.sampled_count - target_tokens, 0) / target_tokens
'''

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "corp-rewards"
version = "0.1"

[project.entry-points."rollouts.rewards"]
corp_brevity = "corp_rewards:brevity"

[tool.hatch.build.targets.wheel]
only-include = ["corp_rewards.py"]
"""


def install(folder: Path) -> Path:
    """Write the package and install it. Without the options after `install`, pip installs it for you and downloads
    what it needs.
    """
    (folder / "corp_rewards.py").write_text(MODULE)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(folder / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, str(folder)], check=True)
    return folder / "site"


def main(steps: int = 30, out: str = "") -> dict[str, Any]:
    out = out or tempfile.mkdtemp()
    with tempfile.TemporaryDirectory() as folder:
        sys.path.append(str(install(Path(folder))))
        rewards = ["env:1", "short=corp-rewards/corp_brevity:-0.1"]
        summary = rollouts.run(env="calculator", reward=rewards, steps=steps, eval_tasks=100, out=out)
    for when in ("before", "after"):
        parts = summary["evaluation"][when]["parts"]
        print(f"{when:6}", "  ".join(f"{name} {value:.2f}" for name, value in parts.items()))
    return summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    main(**vars(parser.parse_args()))
