"""Vector rewards, with primitives: three rewards for each rollout, and a function that makes one number of them.

    python examples/primitives_vector_rewards.py         # about half a minute on a CPU, offline

A right answer is worth nothing if the model did not use its calculator. It prints the mean of each reward, at the
beginning and at the end.
"""

import argparse
import functools
import itertools
import random
import statistics

from rollouts_calculator import Calculator

import rollouts.primitives as rp
from rollouts.training import create_adamw_optimizer

NAMES = ("correct", "used_tool", "brevity")
correct = rp.create_regex_reward(r"-?\d+")


def vector(rollout: rp.Rollout) -> list[float]:
    """The three rewards of a rollout."""
    return [correct(rollout), float(bool(rollout.tool_calls)), rp.length_reward(rollout, target_tokens=4)]


def gated(rewards: list[float]) -> float:
    """One number: the answer counts if the tool was used, and a short answer counts a little more."""
    right, used_tool, brevity = rewards
    return right * used_tool + 0.2 * brevity


def main(iterations: int = 20, seed: int = 0) -> dict[str, float]:
    """Train. Returns the mean of each reward in the last iteration."""
    model, tokenizer = rp.load_model("tiny"), rp.load_tokenizer("tiny")
    state = rp.TrainingState(model, tokenizer, create_adamw_optimizer(model, lr=1e-3))
    environment, means = Calculator(digits=1), {}
    tasks = environment.tasks("train", random.Random(seed))
    sample = functools.partial(rp.create_batch_rollouts, tools=[environment.calculator], samples_per_prompt=8)
    for iteration in range(iterations):
        config = rp.GenerationConfig(max_tokens=32, max_turns=3, seed=1000 * seed + iteration)
        rollouts = sample(model, tokenizer, list(itertools.islice(tasks, 8)), config)
        rollouts = rp.compute_batch_rewards(rollouts, vector, aggregator=gated)
        state, stats = rp.training_step(state, rollouts, rp.create_algorithm_config("grpo"))
        vectors = [rollout.metadata["reward_vector"] for rollout in rollouts]
        means = dict(zip(NAMES, map(statistics.fmean, zip(*vectors, strict=True)), strict=True))
        if iteration in (0, iterations - 1):
            shown = "  ".join(f"{name} {mean:.2f}" for name, mean in means.items())
            print(f"iteration {iteration:2}  reward {stats.mean_reward:.2f} = {shown}")
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    main(given.iterations, given.seed)
