"""Can an agent learn in the environments of this repository? Train the embedded model in each, beside two controls.

    python benchmarks/learn_environments.py                          # every environment, five seeds
    python benchmarks/learn_environments.py --only countdown --seeds 0 1

The embedded model knows nothing of these environments, so a short supervised phase on the environment's own
demonstrations comes first. For FrozenLake these are of a lake without holes, and for twenty questions of a beginner,
who does not use the answers. Three arms begin with that model. `grpo` trains on the environment's reward, `coin` on the
result of a coin, and `entropy` has a loss that lowers the entropy and knows no reward. Tic-tac-toe, against random
moves, has `grpo` alone. The table has the reward on held-out tasks, sampled at temperature 1, at the start and after
each arm. The script exits with 1 if `grpo` rises by less than 0.2 in a seed, or a control by 0.1 or more.

An environment whose package is not installed is left out, and named.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rollouts import Trajectory

RISE_MIN, CONTROL_MAX = 0.2, 0.1
COMMON = "--prompts-per-step 16 --samples-per-prompt 8 --eval-tasks 128".split()
WARM_UP = "--prompts-per-step 32 --eval-tasks 0 --lr 1e-3".split()


class Case(NamedTuple):
    """An environment: its module, its flags, its reward, the steps of the two phases, the tokens of an episode, the
    flags of the supervised phase alone and of the arms alone, which come after the common ones, and the arms.
    """

    module: str
    env: str
    reward: str
    warm_up: int
    steps: int
    max_tokens: int
    only_warm_up: str = ""
    only_arms: str = ""
    arms: Sequence[str] = ("grpo", "coin", "entropy")


CASES = {
    "frozen_lake": Case(
        "rollouts_gymnasium",
        "--env gym/FrozenLake-v1 --env.kwargs.is_slippery false --env.observe observation --env.instructions= "
        "--max-turns 12",
        "upstream",
        100,
        20,
        80,
        '--env.kwargs.desc ["SFFF","FFFF","FFFF","FFFG"]',
    ),
    "countdown": Case("rollouts_countdown", "--env countdown --env.numbers 2 --env.largest 20", "solved", 90, 60, 16),
    "twenty_questions": Case(
        "rollouts_twenty_questions",
        "--env twenty_questions --env.things 5 --env.pool 5 --env.questions 4 --env.hints false",
        "guessed",
        120,
        40,
        80,
        "--env.expert false --prompts-per-step 16 --lr 2e-3",
        "--lr 5e-4",
    ),
    "reasoning_gym": Case(
        "reasoning_gym",
        "--env reasoning_gym/aiw --env.config.task_type_weights [1.0,0.0,0.0] --env.config.max_entities 4 "
        "--env.answer-format last_line",
        "score",
        35,
        64,
        6,
        only_arms="--lr 5e-4",
    ),
    "tictactoe": Case(
        "rollouts_tictactoe",
        "--env tictactoe --env.opponent random",
        "result",
        60,
        16,
        20,
        only_arms="--lr 5e-4",
        arms=["grpo"],
    ),
}
ARMS = {
    "grpo": ["--loss", "grpo"],
    "coin": ["--loss", "grpo", "--reward", f"{Path(__file__).resolve()}:coin", "--reward", "env:0"],
    "entropy": ["--loss", f"{Path(__file__).resolve()}:entropy_only"],
}


def coin(trajectory: Trajectory) -> float:
    """0 or 1 by a hash of the conversation, so that nothing about the task can be learned from it."""
    text = repr([(message.role, message.text) for message in trajectory.messages])
    return float(hashlib.blake2b(text.encode()).digest()[0] & 1)


def entropy_only(entropy: torch.Tensor) -> torch.Tensor:
    """Lowers the entropy."""
    return entropy


def rollouts(*arguments: str) -> None:
    """Run the command. Raises SystemExit with its last words if it fails."""
    done = subprocess.run([sys.executable, "-m", "rollouts", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])


def train(case: Case, seed: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Each arm's held-out reward before and after."""
    env, seeded = case.env.split(), ["--seed", str(seed)]
    warm_up = folder / "warm-up"
    length = ["--steps", str(case.warm_up)]
    rollouts("sft", *env, *seeded, *WARM_UP, *length, *case.only_warm_up.split(), "--out", str(warm_up))
    found = {}
    for arm in case.arms:
        out = folder / arm
        lengths = ["--steps", str(case.steps), "--max-tokens", str(case.max_tokens), *case.only_arms.split()]
        rollouts("run", *env, *seeded, *COMMON, *lengths, "--model", str(warm_up), *ARMS[arm], "--out", str(out))
        evaluation: dict[str, Any] = json.loads((out / "summary.json").read_text())["evaluation"]
        found[arm] = (evaluation["before"]["parts"][case.reward], evaluation["after"]["parts"][case.reward])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Train in each environment and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args(argv)
    print(f"| environment | seed | start | {' | '.join(ARMS)} |\n|---|---|---|{'---|' * len(ARMS)}")
    wrong = []
    for name in arguments.only:
        case = CASES[name]
        if importlib.util.find_spec(case.module) is None:
            print(f"{name} is left out: {case.module} is not installed", file=sys.stderr)
            continue
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory() as folder:
                found = train(case, seed, Path(folder))
            start = found["grpo"][0]
            after = " | ".join(f"{found[arm][1]:.2f}" if arm in found else "" for arm in ARMS)
            print(f"| {name} | {seed} | {start:.2f} | {after} |", flush=True)
            rises = {arm: after - before for arm, (before, after) in found.items()}
            wrong += [
                f"{name}, seed {seed}: {arm} rose by {rise:.2f}"
                for arm, rise in rises.items()
                if (rise < RISE_MIN if arm == "grpo" else rise >= CONTROL_MAX)
            ]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
