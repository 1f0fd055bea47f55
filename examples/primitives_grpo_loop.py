"""The GRPO loop by hand, with primitives: sample, compare, compute a loss, step.

    python examples/primitives_grpo_loop.py              # a few seconds for each ten iterations, on a CPU, offline

It prints the mean reward and the loss of each iteration. `primitives_calculator.py` does the same with
`training_iteration`, which is these five lines.
"""

import argparse
import itertools
import random

from rollouts_calculator import Calculator

import rollouts.primitives as rp
from rollouts.training import create_adamw_optimizer


def main(iterations: int = 20, seed: int = 0) -> list[float]:
    """Train. Returns the mean reward of each iteration."""
    model, tokenizer = rp.load_model("tiny"), rp.load_tokenizer("tiny")
    optimizer = create_adamw_optimizer(model, lr=1e-3)
    environment = Calculator(digits=1)
    tasks, rewards = environment.tasks("train", random.Random(seed)), []
    for iteration in range(iterations):
        rollouts = rp.create_batch_rollouts(
            model,
            tokenizer,
            list(itertools.islice(tasks, 8)),
            rp.GenerationConfig(max_tokens=32, max_turns=3, seed=1000 * seed + iteration),
            samples_per_prompt=8,
            tools=[environment.calculator],
            reward_fn=rp.create_regex_reward(r"-?\d+"),
        )
        batch = rp.create_batch(model, rollouts)  # the policy's logprobs of all sampled ids, with gradient
        loss = rp.compute_grpo_loss(batch, rp.compute_grpo_advantages(batch), clip_high=0.28)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(batch.rewards.nanmean().item())
        print(f"iteration {iteration:2}  reward {rewards[-1]:.3f}  loss {loss.item():+.4f}")
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    main(given.iterations, given.seed)
