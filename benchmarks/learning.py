"""Does every loss learn? Train the embedded model on the calculator with each algorithm, and make a table and a
picture.

    python benchmarks/learning.py                        # all of them with three seeds, about a minute each
    python benchmarks/learning.py --only grpo dpo --seeds 0 1
    python benchmarks/learning.py --out figures          # figures.json, figures.md and figures.svg
    python benchmarks/learning.py --only --add a.json b.json   # the table from the results of two earlier calls

Each run is the README's main job with other settings: 120 steps of 8 tasks x 8 rollouts, then 512 held-out tasks,
sampled and greedy. Each run has its own process. `opd` and `opd_topk` distill the model of the run `grpo`.

Needs matplotlib (requirements-test.txt) and the calculator environment.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEACHER = "{teacher}"

# The flags after `rollouts run --env calculator`, for each row of the table.
RUNS: dict[str, list[str]] = {
    "grpo": ["--loss", "grpo"],
    "dapo": ["--loss", "dapo"],
    "dr_grpo": ["--loss", "dr_grpo"],
    "gspo": ["--loss", "gspo"],
    "cispo": ["--loss", "cispo"],
    "reinforce": ["--loss", "reinforce"],
    "reinforce_pp": ["--loss", "reinforce_pp"],
    "rloo": ["--loss", "rloo"],
    "is": ["--loss", "is"],
    "ppo, value head": ["--loss", "ppo", "--critic", "head"],
    "ppo, separate critic": ["--loss", "ppo", "--critic", "tiny"],
    "rft": ["--loss", "rft"],
    "dpo": ["--loss", "dpo"],
    "grpo, rk3_loss, reference ema": ["--loss", "grpo", "--kl", "rk3_loss", "--kl.coef", "0.01", "--reference", "ema"],
    "grpo, k1_reward": ["--loss", "grpo", "--kl", "k1_reward", "--kl.coef", "0.01"],
    "grpo, 2 minibatches": ["--loss", "grpo", "--minibatches", "2"],
    "opd": ["--loss", "opd", "--teacher", TEACHER],
    "opd_topk": ["--loss", "opd_topk", "--teacher", TEACHER],
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen algorithms and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(RUNS), help="these rows; otherwise all")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--add", nargs="*", type=Path, default=[], help="OUT.json files of earlier calls, to join")
    parser.add_argument("--out", default="learning", help="files are written as OUT.json, OUT.md and OUT.svg")
    arguments = parser.parse_args(argv)
    names = [name for name in RUNS if arguments.only is None or name in arguments.only]
    earlier = [row for path in arguments.add for row in json.loads(path.read_text())]
    with tempfile.TemporaryDirectory() as scratch:
        teacher = Path(scratch) / "teacher"
        rows = [run_once(name, seed, Path(scratch), teacher) for seed in arguments.seeds for name in names]
    rows = sorted(earlier + rows, key=lambda row: (list(RUNS).index(row["name"]), row["seed"]))
    Path(arguments.out + ".json").write_text(json.dumps(rows, indent=1) + "\n")
    Path(arguments.out + ".md").write_text(table(rows))
    draw(rows, Path(arguments.out + ".svg"))
    print(table(rows))


def run_once(name: str, seed: int, scratch: Path, teacher: Path) -> dict[str, Any]:
    """Start one run in its own process. Returns its held-out results, its seconds, and the reward of each step."""
    if TEACHER in RUNS[name] and not teacher.exists():
        keep_teacher(run_folder("grpo", 0, scratch, teacher), teacher)
    out = run_folder(name, seed, scratch, teacher)
    if name == "grpo" and not teacher.exists():
        keep_teacher(out, teacher)
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(out)
    before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
    row = {
        "name": name,
        "command": " ".join(["rollouts run --env calculator", *RUNS[name]]).replace(TEACHER, "TEACHER"),
        "seed": seed,
        "sampled": [before["reward_mean"], after["reward_mean"]],
        "greedy": [before["greedy_mean"], after["greedy_mean"]],
        "wall_seconds": summary["wall_seconds"],
        "cpu_seconds": summary["cpu_seconds"],
        "curve": [line.get("reward/mean") for line in lines],
    }
    print(f"{name} (seed {seed}): {row['sampled'][0]:.3f} -> {row['sampled'][1]:.3f}", file=sys.stderr, flush=True)
    return row


def run_folder(name: str, seed: int, scratch: Path, teacher: Path) -> Path:
    """Run a command. Returns the run's folder. If the run fails, the benchmark ends."""
    out = scratch / f"run-{time.monotonic_ns()}"
    words = [word.replace(TEACHER, str(teacher)) for word in RUNS[name]]
    command = [sys.executable, "-m", "rollouts", "run", "--env", "calculator", *words]
    done = subprocess.run([*command, "--seed", str(seed), "--out", str(out)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return out


def keep_teacher(out: Path, teacher: Path) -> None:
    """Copy the last checkpoint of the run."""
    summary = json.loads((out / "summary.json").read_text())
    shutil.copytree(out / summary["checkpoint"], teacher)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The results as a markdown table: a row for each algorithm, with a value for each seed."""
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    lines = [
        f"| `rollouts run --env calculator ...` | sampled, seeds {seeds} | mean | greedy, mean | CPU s a run |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["name"] for row in rows):
        same = [row for row in rows if row["name"] == name]
        words = same[0]["command"].removeprefix("rollouts run --env calculator ")
        sampled, greedy = ([row[key][1] for row in same] for key in ("sampled", "greedy"))
        each, mean = ", ".join(f"{value:.3f}" for value in sampled), statistics.fmean(sampled)
        seconds = statistics.fmean(row["cpu_seconds"] for row in same)
        lines.append(f"| `{words}` | {each} | **{mean:.3f}** | {statistics.fmean(greedy):.3f} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A picture with a panel for each run: the mean reward at each step, smoothed over ten steps."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rollouts"  # equal results give equal files
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["name"] for row in rows))
    columns = 4
    height = -(-len(names) // columns)
    figure, axes = plt.subplots(height, columns, figsize=(10, 1.9 * height), sharex=True, sharey=True, squeeze=False)
    for place, axis in enumerate(axes.flat):
        if place >= len(names):
            axis.set_visible(False)
            continue
        for row in rows:
            if row["name"] == names[place]:
                curve = [value for value in row["curve"] if value is not None]
                axis.plot(smoothed(curve, 10), linewidth=1.2)
        axis.set_title(names[place], fontsize=8)
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
    figure.supxlabel("optimizer step", fontsize=8)
    figure.supylabel("mean reward of the step's rollouts", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """The mean of the last `width` values at each position."""
    return [sum(values[max(0, end - width) : end]) / min(width, end) for end in range(1, len(values) + 1)]


if __name__ == "__main__":
    main()
