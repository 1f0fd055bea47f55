"""Is a task whose credit is by turn learned with rewards by turn, and not with their sum? Train the embedded model.

    python benchmarks/turn_credit.py                 # five seeds
    python benchmarks/turn_credit.py --seeds 0 1

An episode has six turns. In the first five, the environment says one of three letters, and the right reply is that
letter: 1 for each right reply, by `@reward(per="turn")`. In the last turn it rolls dice: up to 20 points, which no
reply can change. A short supervised phase teaches the form of an answer: its replies are right a little more often
than by chance. Three arms begin with that model. They have the same rewards, tasks, steps and settings, and differ in
the advantage: `turn` compares what each turn earned (`turn_return`), `sum` the sums of whole episodes (`group_norm`,
the default), and `wrong` gives each turn the advantage of its neighbor. The table has the part of right replies on
held-out tasks, sampled at temperature 1. The script exits with 1 if `turn` rises by less than 0.2 in a seed, or one of
the others by 0.1 or more.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rollouts import Message, Task, Trajectory, Turn, cli, reward
from rollouts.training.algorithms.advantages import turn_return

RISE_MIN, CONTROL_MAX = 0.2, 0.1
LETTERS, LAST, POINTS = "abc", "x", 20
HERE = Path(__file__).resolve()
ENV = ["--env", f"{HERE}:Echo"]
WARM_UP = "--steps 48 --prompts-per-step 16 --eval-tasks 0 --lr 1e-3".split()
TRAIN = "--steps 16 --lr 1e-3 --prompts-per-step 8 --samples-per-prompt 8 --eval-tasks 64 --max-turns 6".split()
ARMS = {
    "turn": "--advantage turn_return --advantage.gamma 0",
    "sum": "--advantage group_norm",
    "wrong": f"--advantage {HERE}:neighbor",
}


@dataclass
class Echo:
    """Say what the environment says: one letter in each turn. In the last turn, dice are rolled."""

    asked: int = 5

    def tasks(self, split: str, rng: random.Random) -> Iterator[Task]:
        while True:
            letters = "".join(rng.choices(LETTERS, k=self.asked))
            yield Task(letters[0], answer=letters, id=f"{letters} {rng.random()}")

    def reply(self, trajectory: Trajectory) -> str | None:
        letters = trajectory.task.answer + LAST
        return letters[trajectory.turns] if trajectory.turns < len(letters) else None

    def demonstrations(self, split: str, rng: random.Random) -> Iterator[list[Message]]:
        """The right letter in three of ten replies, and any letter in the others."""
        while True:
            said = [Message("user", each) for each in (*rng.choices(LETTERS, k=self.asked), LAST)]
            yield [message for asked in said for message in (asked, Message("assistant", _said(asked.text, rng)))]

    @reward(per="turn")
    def right(self, task: Task, turn: Turn) -> float:
        """1 for the letter that was asked for."""
        return float(turn.index < self.asked and turn.message.text.strip() == task.answer[turn.index])

    @reward(per="turn")
    def dice(self, turn: Turn, trajectory: Trajectory) -> float:
        """Points of the last turn: the hash of the conversation, so that nothing can be learned from them."""
        text = repr([(message.role, message.text) for message in trajectory.messages])
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        return float(number % (POINTS + 1)) if turn.index == self.asked else 0.0


def _said(asked: str, rng: random.Random) -> str:
    return asked if asked != LAST and rng.random() < 0.3 else rng.choice(LETTERS)


def neighbor(turn_rewards: Sequence[Sequence[float]]) -> list[Tensor]:
    """The control: each turn gets the advantage of the next one, and the last that of the first."""
    return [own.roll(-1) for own in turn_return(turn_rewards, gamma=0.0)]


def rollouts(*arguments: str, log: Path) -> None:
    """One command, in this process; what it prints goes to the log. Raises RuntimeError if it fails."""
    with log.open("a") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = cli.main(arguments)
    if code:
        raise RuntimeError(f"`rollouts {' '.join(arguments)}` ended with {code}:\n{log.read_text()}")


def measure(seed: int, folder: Path) -> dict[str, tuple[float, float]]:
    """The part of right replies before and after each arm."""
    warm_up, log, seeded = folder / "warm-up", folder / "log", ["--seed", str(seed)]
    rollouts("sft", *ENV, *WARM_UP, *seeded, "--out", str(warm_up), log=log)
    found = {}
    for name, flags in ARMS.items():
        out = folder / name
        command = ("run", *ENV, "--model", str(warm_up), *TRAIN, *flags.split(), *seeded, "--out", str(out))
        rollouts(*command, log=log)
        evaluation = json.loads((out / "summary.json").read_text())["evaluation"]
        before, after = (evaluation[moment]["parts"]["right"] / Echo.asked for moment in ("before", "after"))
        found[name] = (before, after)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    seeds = parser.parse_args(argv).seeds
    print(f"{'seed':>4}  {'start':>6}" + "".join(f"{name:>10}" for name in ARMS) + f"{'CPU s':>10}", flush=True)
    rises: dict[str, list[float]] = {name: [] for name in ARMS}
    for seed in seeds:
        begun = time.process_time()
        with tempfile.TemporaryDirectory(prefix="rollouts-turns-") as folder:
            found = measure(seed, Path(folder))
        for name, (before, after) in found.items():
            rises[name].append(after - before)
        start, seconds = found["turn"][0], time.process_time() - begun
        afters = "".join(f"{after:>10.3f}" for _, after in found.values())
        print(f"{seed:>4}  {start:>6.3f}{afters}{seconds:>10.0f}", flush=True)
    print(f"{'mean rise':>12}" + "".join(f"{statistics.fmean(values):>+10.3f}" for values in rises.values()))
    has_learned = min(rises["turn"]) >= RISE_MIN
    is_flat = all(max(values) < CONTROL_MAX for name, values in rises.items() if name != "turn")
    print("holds" if has_learned and is_flat else "does not hold")
    return 0 if has_learned and is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
