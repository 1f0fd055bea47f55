"""Draw docs/learning-curve.svg, the README's learning curve, from real runs of the main job.

    python scripts/learning_curve.py                          # three seeds, about a minute each
    python scripts/learning_curve.py --runs runs/a runs/b     # runs that exist already; nothing is trained

Each thin line is the mean reward of one seed's rollouts at each step. The thick line is the mean of the seeds. The dots
are the held-out scores before and after training. The picture has no background, and its colors are readable on white
and on black.

Needs matplotlib (requirements-test.txt) and the calculator environment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ["run", "--env", "calculator", "--loss", "grpo"]
INK, LINE = "#7d8590", "#3b82f6"


class Curve(NamedTuple):
    """A run: the mean reward of each step, and of the held-out tasks before and after."""

    rewards: list[float]
    before: float
    after: float


def main(argv: Sequence[str] | None = None) -> None:
    """Run the main job, or read the given runs, and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", type=Path, help="folders of runs to draw; otherwise run the main job")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="the seeds to run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "learning-curve.svg", help="the picture")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folders = arguments.runs or [train(seed, Path(scratch)) for seed in arguments.seeds]
        draw([read(folder) for folder in folders], arguments.out)
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")


def train(seed: int, scratch: Path) -> Path:
    """Run the main job with a seed. Returns its folder."""
    folder = scratch / f"seed-{seed}"
    command = [sys.executable, "-m", "rollouts", *COMMAND, "--seed", str(seed), "--out", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def read(folder: Path) -> Curve:
    """The curve of a finished run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluation = json.loads((folder / "summary.json").read_text())["evaluation"]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    return Curve(rewards, evaluation["before"]["reward_mean"], evaluation["after"]["reward_mean"])


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Write the picture. Equal curves give equal files."""
    import matplotlib

    matplotlib.use("svg")
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    style = {"svg.fonttype": "none", "svg.hashsalt": "rollouts", "font.family": "sans-serif", "font.size": 9, **colors}
    with matplotlib.rc_context(style):
        import matplotlib.pyplot as plt

        figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
        mean = [statistics.fmean(step) for step in zip(*(curve.rewards for curve in curves), strict=True)]
        steps = range(1, len(mean) + 1)
        for curve in curves:
            axis.plot(steps, curve.rewards, color=LINE, alpha=0.35, linewidth=0.8)
        axis.plot(steps, mean, color=LINE, linewidth=2, label=f"sampled rollouts, {len(curves)} seeds")
        held_out = [(0, curve.before) for curve in curves] + [(len(mean), curve.after) for curve in curves]
        axis.scatter(*zip(*held_out, strict=True), s=18, color="#f97316", zorder=3, label="held-out tasks")
        axis.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.05))
        axis.grid(alpha=0.25, color=INK)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(loc="lower right", frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
