"""Does a model learn from its own saved trajectories? Train the embedded model on them, beside a control.

    python benchmarks/offline.py                     # five seeds
    python benchmarks/offline.py --seeds 0 1

A run of the calculator saves rollouts of the embedded model: its learning rate is 1e-12, so that all of them are of one
model. From there each arm trains that model, and generates nothing: `rft` on the good rollouts, `grpo` on all with the
stored logprobs, `dpo` on pairs, `wrong` on the good ones of a rescored folder whose reward is 1 for a wrong answer, and
`all` on every rollout alike, whatever it earned. The table has the reward on the same held-out tasks, sampled at
temperature 1. The script exits with 1 if `rft`, `grpo` or `dpo` rises by less than 0.2 in a seed, or if one of the
other two rises by 0.1 or more.
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

RISE_MIN, CONTROL_MAX = 0.2, 0.1
SAVE = "run --env calculator --steps 24 --lr 1e-12 --eval-tasks 0".split()
TRAIN = "--steps 48 --eval-tasks 128".split()
REWARD = '''
def wrong(task, trajectory):
    """1 for a wrong answer."""
    return float(str(task.answer) not in trajectory.last_text)
'''
ARMS = {
    "rft": ("base", "--loss rft"),
    "grpo": ("base", "--loss grpo"),
    "dpo": ("base", "--loss dpo --pairs all_pairs --lr 1e-3 --steps 96"),
    "wrong": ("rescored", "--loss rft --reward env"),
    "all": ("base", "--loss rft --select.threshold=-1"),
}
LEARN = ("rft", "grpo", "dpo")


def rollouts(*arguments: str, folder: Path) -> None:
    """One command, in a process of its own. Raises CalledProcessError if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "rollouts", *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        print(done.stdout.decode(), file=sys.stderr)
        done.check_returncode()


def measure(seed: int, folder: Path) -> dict[str, tuple[float, float]]:
    """The reward before and after each arm."""
    (folder / "wrong.py").write_text(REWARD)
    rollouts(*SAVE, "--seed", str(seed), "--out", "base", folder=folder)
    rollouts("rescore", "base", "--reward", "./wrong.py:wrong", "--out", "rescored", folder=folder)
    found = {}
    for name, (saved, flags) in ARMS.items():
        rollouts("run", "--from", saved, *TRAIN, *flags.split(), "--out", name, folder=folder)
        evaluation = json.loads((folder / name / "summary.json").read_text())["evaluation"]
        found[name] = (evaluation["before"]["reward_mean"], evaluation["after"]["reward_mean"])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    seeds = parser.parse_args(argv).seeds
    print(f"{'seed':>4}  {'start':>6}" + "".join(f"{name:>10}" for name in ARMS), flush=True)
    rises: dict[str, list[float]] = {name: [] for name in ARMS}
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="rollouts-offline-") as folder:
            found = measure(seed, Path(folder))
        for name, (before, after) in found.items():
            rises[name].append(after - before)
        start = next(iter(found.values()))[0]
        print(f"{seed:>4}  {start:>6.3f}" + "".join(f"{after:>10.3f}" for _, after in found.values()), flush=True)
    means = "".join(f"{statistics.fmean(values):>+10.3f}" for values in rises.values())
    print(f"{'mean rise':>12}{means}")
    has_learned = all(min(rises[name]) >= RISE_MIN for name in LEARN)
    is_flat = all(max(values) < CONTROL_MAX for name, values in rises.items() if name not in LEARN)
    print("holds" if has_learned and is_flat else "does not hold")
    return 0 if has_learned and is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
