"""Does choosing tasks by outcome save steps? Train on easy, right and hard tasks, with two samplers.

    python benchmarks/samplers.py                    # five seeds
    python benchmarks/samplers.py --seeds 5 6 7 8 9 10 11 12 13 14

The default `--sampler.after 1` was chosen on seeds 0 to 4.

Of 48 tasks, 8 are questions of the calculator, which the embedded model can learn. 20 are too easy: any reply earns 1.
20 are too hard: they ask for a number that the model cannot know. So only the 8 ever give a gradient. Each arm trains
the same model with the same seed until its sampled reward on 32 other calculator questions, measured after every fourth
step, is at least 0.8 (or 250 steps long): `uniform` visits all tasks in order, and `difficulty` retires easy and hard
ones. The table has the number of steps of each arm, and below it the mean of the paired differences with a 95 %
interval of Student's t. The script exits with 1 unless the whole interval is above 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollouts import cli

ARMS = ("uniform", "difficulty")
REACHED, STEPS_MAX = 0.8, 250
QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5 % of Student's t, by the number of seeds."""
TRAIN = f"""run --steps {STEPS_MAX} --prompts-per-step 2 --lr 1e-4 --eval-tasks 32 --eval-every 4 --max-tokens 32
--stop-when eval/reward_mean>={REACHED}""".split()
ENVIRONMENT = '''
from dataclasses import dataclass
from itertools import islice

from rollouts import Task, reward
from rollouts_calculator import Calculator


@dataclass
class Mixed(Calculator):
    """Questions that are too easy, right and too hard; for evaluations the right ones alone."""

    easy: int = 20
    right: int = 8
    hard: int = 20

    def tasks(self, split, rng):
        if split == "eval":
            return super().tasks(split, rng)
        right = list(islice(super().tasks(split, rng), self.right))
        easy = [Task(f"Say anything about {n}.", info={"kind": "easy"}) for n in range(self.easy)]
        hard = [Task(f"Which number is in box {n}?", rng.randrange(10**9)) for n in range(self.hard)]
        return right + easy + hard

    @reward
    def correct(self, task, trajectory):
        return 1.0 if task.info.get("kind") == "easy" else super().correct(task, trajectory)
'''


def steps_of(sampler: str, seed: int, folder: Path) -> int:
    """How many steps a run takes to the wanted reward; at most STEPS_MAX. Raises RuntimeError if the run fails."""
    (folder / "mixed.py").write_text(ENVIRONMENT)
    out, log = folder / sampler, folder / "log"
    command = [*TRAIN, "--env", f"{folder / 'mixed.py'}:Mixed", "--sampler", sampler, "--seed", str(seed)]
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        code = cli.main([*command, "--out", str(out)])
    if code:
        raise RuntimeError(f"`rollouts {' '.join(command)}` ended with {code}:\n{log.read_text()}")
    return int(json.loads((out / "summary.json").read_text())["steps"])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the half width of its 95 % interval."""
    half = QUANTILES[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="two to ten seeds")
    seeds = parser.parse_args(argv).seeds
    print(f"{'seed':>4}" + "".join(f"{name:>12}" for name in ARMS), flush=True)
    saved = []
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="rollouts-samplers-") as folder:
            steps = [steps_of(name, seed, Path(folder)) for name in ARMS]
        saved.append(float(steps[0] - steps[1]))
        print(f"{seed:>4}" + "".join(f"{each:>12}" for each in steps), flush=True)
    mean, half = interval(saved)
    print(f"steps saved: {mean:.1f} ± {half:.1f}")
    return 0 if mean - half > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
