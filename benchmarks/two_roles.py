"""Do two roles learn in one episode? Train the embedded model with two roles, and print the reward of each role on
held-out tasks before and after.

    python benchmarks/two_roles.py                  # five seeds, about half a minute each
    python benchmarks/two_roles.py --seeds 0 1

The caller sees two digits and repeats the last one. The counter hears what the caller says, and answers 1 if the digit
is above 4, else 0. Their rewards differ: the caller's does not depend on the counter, and the counter's is about the
digit of the task, so that it suffers from a caller who is wrong. A short supervised phase on conversations of each role
comes first (`--mode sft+rl`); the table begins after it, so it shows reinforcement learning alone.
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

from rollouts import Message, Role, Task, Trajectory, reward
from rollouts.agent.model import ChatModel

RISE_MIN = 0.2  # by this much the reward of each role has to rise
FLAGS = (
    "--mode sft+rl --sft.steps 36 --steps 40 --loss grpo --prompts-per-step 16 --samples-per-prompt 8 --max-tokens 12 "
    "--eval-tasks 20"
).split()


class Counting:
    """A caller passes on a digit, and a counter says whether it is above 4."""

    roles = (
        Role("caller", system="Repeat the last digit."),
        Role("counter", system="Is it above four?"),
    )

    def tasks(self, split: str, rng: random.Random) -> list[Task]:
        """All pairs of digits; a fifth of them is for evaluation."""
        pairs = [(a, b) for a in range(10) for b in range(10) if ((a + b) % 5 == 0) == (split == "eval")]
        return [Task(f"{a} {b}", answer=[str(b), str(int(b > 4))]) for a, b in pairs]

    def demonstrations(self, split: str, rng: random.Random) -> Iterator[list[Message]]:
        """Conversations of each role. Those of the counter, who has more to learn, are twice as many."""
        tasks, (caller, counter) = self.tasks("train", rng), self.roles
        while True:
            task = rng.choice(tasks)
            digit, above = task.answer
            yield [Message("system", caller.system), *task.messages, Message("assistant", digit)]
            for _ in range(2):
                yield [Message("system", counter.system), Message("user", digit), Message("assistant", above)]

    async def rollout(self, task: Task, model: ChatModel) -> None:
        """The caller speaks, and the counter answers."""
        said = await model.role("caller").say(task.prompt)
        await model.role("counter").say(said.text or "nothing")

    @reward(role="caller")
    def same(self, task: Task, trajectory: Trajectory) -> float:
        """1 if the caller repeats the digit."""
        return float(trajectory.last_text == task.answer[0])

    @reward(role="counter")
    def above(self, task: Task, trajectory: Trajectory) -> float:
        """1 if the counter is right about the digit of the task."""
        return float(trajectory.last_text == task.answer[1])


def train(seed: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Train with this seed. Returns each role's mean held-out reward before and after, sampled at temperature 1."""
    command = [sys.executable, "-m", "rollouts", "run", "--env", f"{Path(__file__).resolve()}:Counting", *FLAGS]
    done = subprocess.run([*command, "--seed", str(seed), "--out", str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    evaluation = json.loads((folder / "rl" / "summary.json").read_text())["evaluation"]
    before, after = evaluation["before"]["roles"], evaluation["after"]["roles"]
    return {role: (before[role]["reward_mean"], after[role]["reward_mean"]) for role in before}


def main(argv: Sequence[str] | None = None) -> None:
    """Train with each seed and print the table. Exits with 1 if the reward of a role rises too little."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args(argv)
    print("| seed | caller before | caller after | counter before | counter after |\n|---|---|---|---|---|")
    rises = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found = train(seed, Path(folder) / "run")
        numbers = [f"{value:.2f}" for role in ("caller", "counter") for value in found[role]]
        print(f"| {seed} | {' | '.join(numbers)} |", flush=True)
        rises += [after - before for before, after in found.values()]
    if min(rises) < RISE_MIN:
        raise SystemExit(f"the reward of a role rose by {min(rises):.2f} only; at least {RISE_MIN} is expected")


if __name__ == "__main__":
    main()
