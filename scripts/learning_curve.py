"""Draw docs/learning-curve.svg, the README's learning curve, from real runs of the main job; or what each reward of a
run earned, as in docs/reward-parts.svg.

    python scripts/learning_curve.py                          # three seeds, about a minute each
    python scripts/learning_curve.py --runs runs/a runs/b     # runs that exist already; nothing is trained
    python scripts/learning_curve.py --parts runs/sum --out parts.svg    # the rewards of one run

Each thin line is the mean reward of one seed's rollouts at each step. The thick line is the mean of the seeds. The dots
are the held-out scores before and after training. With `--parts`, each thin line is the mean of one reward times its
weight, and the thick line is their sum. The pictures have no background, and their colors are readable on white and on
black.

Needs matplotlib (requirements-test.txt) and the calculator environment.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ["run", "--env", "calculator", "--loss", "grpo"]
INK, LINE = "#7d8590", "#3b82f6"
PART_LINES = ("#f97316", "#22a06b", "#a855f7", "#e0559a", "#0ea5b7")


class Curve(NamedTuple):
    """A run: the mean reward of each step, and of the held-out tasks before and after."""

    rewards: list[float]
    before: float
    after: float


class Part(NamedTuple):
    """A reward of a run: its weight, and its mean over the rollouts of each step."""

    name: str
    weight: float
    means: list[float]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the main job, or read the given runs, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", type=Path, help="folders of runs to draw; otherwise run the main job")
    parser.add_argument("--parts", type=Path, help="draw what each reward of this run earned")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="the seeds to run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "learning-curve.svg", help="the picture")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.parts:
            draw_parts(*read_parts(arguments.parts), arguments.out)
        else:
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
    evaluation = json.loads((folder / "summary.json").read_text())["evaluation"]
    rewards = [line["reward/mean"] for line in steps(folder)]
    return Curve(rewards, evaluation["before"]["reward_mean"], evaluation["after"]["reward_mean"])


def read_parts(folder: Path) -> tuple[list[Part], list[float]]:
    """The rewards of a finished run that has held-out tasks, and the mean of their weighted sum at each step."""
    weights = json.loads((folder / "summary.json").read_text())["evaluation"]["after"]["weights"]
    lines = steps(folder)
    parts = [
        Part(name, weight, [line.get(f"reward_part/{name}", float("nan")) for line in lines])
        for name, weight in weights.items()
    ]
    return parts, [line["reward/mean"] for line in lines]


def steps(folder: Path) -> list[dict[str, float]]:
    """The metrics of the training steps of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/mean" in line]


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Write the picture of learning curves. Equal curves give equal files."""
    with picture(path, "mean reward") as axis:
        mean = [statistics.fmean(step) for step in zip(*(curve.rewards for curve in curves), strict=True)]
        numbers = range(1, len(mean) + 1)
        for curve in curves:
            axis.plot(numbers, curve.rewards, color=LINE, alpha=0.35, linewidth=0.8)
        axis.plot(numbers, mean, color=LINE, linewidth=2, label=f"sampled rollouts, {len(curves)} seeds")
        held_out = [(0, curve.before) for curve in curves] + [(len(mean), curve.after) for curve in curves]
        axis.scatter(*zip(*held_out, strict=True), s=18, color="#f97316", zorder=3, label="held-out tasks")
        axis.set_ylim(0, 1.05)
        axis.legend(loc="lower right", frameon=False)


def draw_parts(parts: Sequence[Part], totals: Sequence[float], path: Path) -> None:
    """Write the picture of a run's rewards: each times its weight, and their sum. Equal runs give equal files."""
    with picture(path, "weight × mean") as axis:
        numbers = range(1, len(totals) + 1)
        axis.plot(numbers, totals, color=LINE, linewidth=2, label="sum")
        for part, color in zip(parts, itertools.cycle(PART_LINES)):
            label = part.name if part.weight == 1 else f"{part.weight:g} × {part.name}"
            axis.plot(numbers, [part.weight * mean for mean in part.means], color=color, linewidth=1, label=label)
        axis.legend(loc="center right", frameon=False)


@contextlib.contextmanager
def picture(path: Path, y_label: str) -> Iterator[Any]:
    """The axis of an empty picture over optimizer steps, which is written at the end of the block."""
    import matplotlib

    matplotlib.use("svg")
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    style = {"svg.fonttype": "none", "svg.hashsalt": "rollouts", "font.family": "sans-serif", "font.size": 9, **colors}
    with matplotlib.rc_context(style):
        import matplotlib.pyplot as plt

        figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
        axis.set(xlabel="optimizer step", ylabel=y_label)
        axis.grid(alpha=0.25, color=INK)
        axis.spines[["top", "right"]].set_visible(False)
        yield axis
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
