"""Does each role of a game learn against a frozen opponent? Train the embedded model in a game of two roles.

    python benchmarks/frozen_opponent.py                  # five seeds, about a minute each
    python benchmarks/frozen_opponent.py --seeds 0 1

Both roles answer with a number, and the larger last digit wins. For each seed there are two runs: one trains the first
role, the other the second role. The model as it was at the start plays the other role, with the setting
`--role.NAME.model tiny`. The table has the mean reward of the trained role on held-out tasks, sampled at temperature 1.
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

from rollouts import Role, Task, reward
from rollouts.agent.model import ChatModel

RISE_MIN = 0.2  # by this much the reward of each role has to rise
ROLES = ("first", "second")
FLAGS = (
    "--steps 30 --loss grpo --prompts-per-step 8 --samples-per-prompt 8 --max-tokens 12 --eval-tasks 128 --filter none"
).split()


class Duel:
    """Both roles answer with a number, and the larger last digit wins. Equal digits are a loss for both."""

    roles = tuple(map(Role, ROLES))

    def tasks(self, split: str, rng: random.Random) -> Iterator[Task]:
        """Games without end. They differ in their names only."""
        while True:
            yield Task(f"game {rng.random()}")

    def setup(self, task: Task) -> None:
        """Nobody has said anything yet."""
        self.digits = dict.fromkeys(ROLES, -1)

    async def rollout(self, task: Task, model: ChatModel) -> None:
        """Each role answers once, without the other's answer."""
        for name in ROLES:
            reply = await model.role(name).say("What is 1 + 1?")
            self.digits[name] = next((int(c) for c in reversed(reply.text) if c in "0123456789"), -1)

    @reward(role="first")
    def first_wins(self) -> float:
        """1 if the first role has the larger digit."""
        return float(self.digits["first"] > self.digits["second"])

    @reward(role="second")
    def second_wins(self) -> float:
        """1 if the second role has the larger digit."""
        return float(self.digits["second"] > self.digits["first"])


def train(role: str, seed: int, folder: Path) -> tuple[float, float]:
    """Train this role. Returns its mean held-out reward before and after."""
    (other,) = set(ROLES) - {role}
    command = [sys.executable, "-m", "rollouts", "run", "--env", f"{Path(__file__).resolve()}:Duel", *FLAGS]
    command += [f"--role.{other}.model", "tiny", "--seed", str(seed), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    evaluation = json.loads((folder / "summary.json").read_text())["evaluation"]
    assert set(evaluation["after"]["roles"]) == {role}, "the other role is not trained"
    return evaluation["before"]["reward_mean"], evaluation["after"]["reward_mean"]


def main(argv: Sequence[str] | None = None) -> None:
    """Train with each seed and print the table. Exits with 1 if the reward of a role rises too little."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args(argv)
    print("| seed | first before | first after | second before | second after |\n|---|---|---|---|---|")
    rises = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found = [train(role, seed, Path(folder) / role) for role in ROLES]
        print(f"| {seed} | {' | '.join(f'{value:.2f}' for pair in found for value in pair)} |", flush=True)
        rises += [after - before for before, after in found]
    if min(rises) < RISE_MIN:
        raise SystemExit(f"the reward of a role rose by {min(rises):.2f} only; at least {RISE_MIN} is expected")


if __name__ == "__main__":
    main()
