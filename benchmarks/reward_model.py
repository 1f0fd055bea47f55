"""What does it save to score all groups that wait in one call? Samples per CPU second of a small reward model.

    OMP_NUM_THREADS=1 python benchmarks/reward_model.py
    OMP_NUM_THREADS=1 python benchmarks/reward_model.py --layers 8 --hidden 512 --passes 3

The reward `reward_model` scores the rollouts of a step (16 groups of 8) and of an evaluation (128 groups of one), with
a random sequence-classification model and the tokenizer of `tiny`. `each group` is one call for each group, and `all
groups` one call for all. They take turns, and the figures are those of the median pass of each. Below is the largest
difference between their scores; the script exits with 1 if it is above 1e-5. Needs `plugins/reward_model`.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
import trio
from rollouts_reward_model import load_reward_model, reward_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from rollouts import Message, Task, Trajectory
from rollouts.models.loading import TINY_PATH

WORDS = "the answer of this sum is easy to find with a calculator so I use it and then I say what it gave me".split()
SHAPES = {"a step, 16 groups of 8": (16, 8), "an evaluation, 128 groups of 1": (128, 1)}


def save_model(folder: str, layers: int, hidden: int) -> None:
    """A random Llama with a head for one score."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=469,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=1024,
        num_labels=1,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_PATH).save_pretrained(folder)


def conversation(rng: random.Random, longest: int) -> Trajectory:
    """A question, and a reply of 1 to `longest` words."""
    task = Task(f"What is {rng.randrange(100)} + {rng.randrange(100)}?")
    reply = " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))
    return Trajectory(task, [*task.messages, Message("assistant", reply)])


def scores_of(calls: Sequence[list[list[Trajectory]]], folder: str) -> list[float]:
    """The scores of all groups, in their order."""
    found: list[float] = []
    for groups in calls:
        scored = trio.run(functools.partial(reward_model, groups, model=folder, device="cpu"))
        found += [score.value for group in scored for score in group]
    return found


def measure(folder: str, shape: tuple[int, int], longest: int, passes: int) -> tuple[dict[str, float], float]:
    """Samples per CPU second of each arm, and the largest difference of a score."""
    rng = random.Random(0)
    groups = [[conversation(rng, longest) for _ in range(shape[1])] for _ in range(shape[0])]
    arms = {"each group": [[group] for group in groups], "all groups": [groups]}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    scores = {}
    for number in range(passes + 1):
        for name, calls in arms.items():
            start = time.process_time()
            scores[name] = scores_of(calls, folder)
            if number:  # the first pass is a warm-up
                seconds[name].append(time.process_time() - start)
    rates = {name: shape[0] * shape[1] / statistics.median(each) for name, each in seconds.items()}
    pairs = zip(scores["each group"], scores["all groups"], strict=True)
    return rates, max(abs(one - other) for one, other in pairs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--longest", type=int, default=40, help="the most words of a reply")
    parser.add_argument("--passes", type=int, default=7)
    given = parser.parse_args(argv)
    furthest = 0.0
    with tempfile.TemporaryDirectory(prefix="rollouts-reward-model-") as folder:
        save_model(folder, given.layers, given.hidden)
        size = sum(each.numel() for each in load_reward_model(folder, device="cpu").model.parameters())
        print(
            f"{size / 1e6:.1f} million parameters, {torch.get_num_threads()} threads; samples per CPU second",
            flush=True,
        )
        for name, shape in SHAPES.items():
            rates, difference = measure(folder, shape, given.longest, given.passes)
            furthest = max(furthest, difference)
            shown = "".join(f"{arm:>12} {rate:8.1f}" for arm, rate in rates.items())
            print(f"{name:<32}{shown}{rates['all groups'] / rates['each group']:10.2f} x", flush=True)
    print(f"largest difference of a score: {furthest:.1e}")
    return 0 if furthest <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
