"""Does a model learn from its own saved trajectories? Train the embedded model on them, beside a control.

    python benchmarks/offline.py                     # five seeds
    python benchmarks/offline.py --seeds 0 1

A run of the calculator saves rollouts of the embedded model: its learning rate is 1e-12, so that all of them are of one
model. From there each arm trains that model, and generates nothing: `rft` on the good rollouts, `grpo` on all with the
stored logprobs, `dpo` on pairs with the likelihood of the chosen rollout, `wrong` on the good ones of a rescored folder
whose reward is 1 for a wrong answer, and `all` on every rollout alike, whatever it earned. The table has the reward on
the same held-out tasks, sampled at temperature 1. The script exits with 1 if `rft`, `grpo` or `dpo` rises by less than
0.2 in a seed, or if one of the other two rises by 0.1 or more.

    python benchmarks/offline.py --rescore           # 1,024 rollouts

With `--rescore`, a run asks two rewards, and the same two judge its saved trajectories again. The script exits with 1
unless every reward, part and reason is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollouts import cli

RISE_MIN, CONTROL_MAX = 0.2, 0.1
SAVE = "run --env calculator --steps 24 --lr 1e-12 --eval-tasks 0".split()
TRAIN = "--steps 48 --eval-tasks 128".split()
REWARD = '''
from rollouts import Score


def short(trajectory, *, target: int = 10):
    """How much longer the last reply is than the target, and how many turns there were."""
    return Score(len(trajectory.last_text) / target, {"turns": trajectory.turns}, trajectory.last_text[:20])


def wrong(task, trajectory):
    """1 for a wrong answer."""
    return float(str(task.answer) not in trajectory.last_text)
'''
ARMS = {
    "rft": ("base", "--loss rft"),
    "grpo": ("base", "--loss grpo"),
    "dpo": ("base", "--loss dpo --pairs all_pairs --lr 3e-4 --steps 96 --loss.nll-coef 1"),
    "wrong": ("rescored", "--loss rft --reward env"),
    "all": ("base", "--loss rft --select.threshold=-1"),
}
LEARN = ("rft", "grpo", "dpo")


def rollouts(*arguments: str, log: Path) -> None:
    """One command, in this process; what it prints goes to the log. Raises RuntimeError if it fails."""
    with log.open("a") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = cli.main(arguments)
    if code:
        raise RuntimeError(f"`rollouts {' '.join(arguments)}` ended with {code}:\n{log.read_text()}")


def measure(seed: int, folder: Path) -> dict[str, tuple[float, float]]:
    """The reward before and after each arm."""
    (folder / "wrong.py").write_text(REWARD)
    base, rescored, log = str(folder / "base"), str(folder / "rescored"), folder / "log"
    rollouts(*SAVE, "--seed", str(seed), "--out", base, log=log)
    rollouts("rescore", base, "--reward", f"{folder / 'wrong.py'}:wrong", "--out", rescored, log=log)
    found = {}
    for name, (saved, flags) in ARMS.items():
        command = ("run", "--from", str(folder / saved), *TRAIN, *flags.split(), "--out", str(folder / name))
        rollouts(*command, log=log)
        evaluation = json.loads((folder / name / "summary.json").read_text())["evaluation"]
        found[name] = (evaluation["before"]["reward_mean"], evaluation["after"]["reward_mean"])
    return found


def rescored_lines(folder: Path) -> tuple[int, int]:
    """How many saved rollouts there are, and how many of them get the same reward, parts and reason again."""
    (folder / "wrong.py").write_text(REWARD)
    rewards = [word for name in ("wrong", "short:-0.1") for word in ("--reward", f"{folder / 'wrong.py'}:{name}")]
    live, again, log = folder / "live", folder / "again", folder / "log"
    rollouts("run", "--env", "calculator", "--steps", "16", "--eval-tasks", "0", *rewards, "--out", str(live), log=log)
    rollouts("rescore", str(live), *rewards, "--out", str(again), log=log)
    pairs = list(zip(*(_judged(run) for run in (live, again)), strict=True))
    return len(pairs), sum(before == after for before, after in pairs)


def _judged(run: Path) -> list[list[object]]:
    lines = [json.loads(line) for file in sorted(run.glob("trajectories/step_*")) for line in file.open()]
    return [[line[name] for name in ("group", "rollout", "reward", "parts", "weights", "why")] for line in lines]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rescore", action="store_true", help="compare rescoring with the rewards of the run")
    given = parser.parse_args(argv)
    if given.rescore:
        with tempfile.TemporaryDirectory(prefix="rollouts-offline-") as folder:
            count, same = rescored_lines(Path(folder))
        print(f"{same} of {count} rollouts have the same reward, parts and reason")
        return int(same != count)
    seeds = given.seeds
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
