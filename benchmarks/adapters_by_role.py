"""Can two roles with opposite goals both learn? Train one LoRA adapter for each role over one model.

    python benchmarks/adapters_by_role.py                  # five seeds, about a minute each
    python benchmarks/adapters_by_role.py --seeds 0 1

Both roles get the same prompt. One earns more for a larger last digit, the other for a smaller one. With one policy for
both (the control), what one role gains the other loses, so their mean stays near 0.5. With `--lora-per-role`, both
rewards rise. The table has the mean reward of each role on held-out tasks, sampled at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollouts import Role, Task, Trajectory, reward
from rollouts.agent.model import ChatModel

RISE_MIN = 0.2  # by this much the reward of each role has to rise
ROLES = ("high", "low")
FLAGS = (
    "--steps 30 --loss grpo --prompts-per-step 8 --samples-per-prompt 8 --max-tokens 12 --eval-tasks 64 --filter none "
    "--lora-rank 8"
).split()


class Opposites:
    """Both roles answer the same question: one with a large digit, the other with a small one."""

    roles = tuple(map(Role, ROLES))

    def tasks(self, split: str, rng: random.Random) -> Iterator[Task]:
        """Games without end. They differ in their names only."""
        while True:
            yield Task(f"game {rng.random()}")

    async def rollout(self, task: Task, model: ChatModel) -> None:
        """Each role answers once, without the other's answer."""
        for name in ROLES:
            await model.role(name).say("What is 1 + 1?")

    @reward(role="high")
    def large(self, trajectory: Trajectory) -> float:
        """A ninth of the last digit; 0 without a digit."""
        return max(last_digit(trajectory.last_text), 0) / 9

    @reward(role="low")
    def small(self, trajectory: Trajectory) -> float:
        """1 for the last digit 0, and 0 for 9 or without a digit."""
        return 1 - last_digit(trajectory.last_text) % 10 / 9


def last_digit(text: str) -> int:
    """The last digit of the text; -1 without a digit."""
    return next((int(c) for c in reversed(text) if c in "0123456789"), -1)


def train(seed: int, folder: Path, *flags: str) -> dict[str, tuple[float, float]]:
    """Train both roles. Returns the mean held-out reward of each, before and after."""
    command = [sys.executable, "-m", "rollouts", "run", "--env", f"{Path(__file__).resolve()}:Opposites", *FLAGS]
    done = subprocess.run([*command, *flags, "--seed", str(seed), "--out", str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    before, after = (json.loads((folder / "summary.json").read_text())["evaluation"][k] for k in ("before", "after"))
    return {role: (before["roles"][role]["reward_mean"], after["roles"][role]["reward_mean"]) for role in ROLES}


def main(argv: Sequence[str] | None = None) -> None:
    """Train with each seed and print the table. Exits with 1 if the reward of a role rises too little."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args(argv)
    print("| seed | high before | high after | low before | low after | one adapter: high after | low after |")
    print("|---|---|---|---|---|---|---|")
    rises = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            own = train(seed, Path(folder) / "own", "--lora-per-role", "true")
            shared = train(seed, Path(folder) / "shared")
        values = [*own["high"], *own["low"], shared["high"][1], shared["low"][1]]
        print(f"| {seed} | {' | '.join(f'{value:.2f}' for value in values)} |", flush=True)
        rises += [after - before for before, after in own.values()]
    if min(rises) < RISE_MIN:
        raise SystemExit(f"the reward of a role rose by {min(rises):.2f} only; at least {RISE_MIN} is expected")


if __name__ == "__main__":
    main()
