"""Batches of rollouts from a function of your own: `generate_rollout_batches`.

    python examples/rollout_generation.py               # a few seconds on a laptop's CPU, offline
    python examples/rollout_generation.py --steps 1

You write `generate`, which answers prompts with whatever you have: here transformers and the model `tiny`. The
generator takes the prompts from a buffer, calls your function, sets the rewards and drops the groups of replies that
are all right or all wrong. A loop of your own would train on each batch. It prints:

    step 0: kept groups [0, 1, 2, 3]
      rewards [0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0], reply lengths [6, 5, 6, 5, 5, 5, 5, 5, 6, 5, 5, 5]
    step 1: kept groups [0, 2]
      rewards [0, 1, 0, 0, 1, 0], reply lengths [6, 6, 6, 6, 5, 6]
    step 2: kept groups [1]
      rewards [1, 1, 0], reply lengths [4, 4, 4]
"""

from __future__ import annotations

import argparse
import itertools
import re

import torch

from rollouts import Sample
from rollouts.models.loading import load_tokenizer
from rollouts.training import (
    DataBuffer,
    RolloutBatch,
    RolloutConfig,
    check_reward_nonzero_std,
    generate_rollout_batches,
    load_hf_model,
)


def main(steps: int = 3) -> list[RolloutBatch]:
    torch.manual_seed(0)
    model, tokenizer = load_hf_model("tiny", device="cpu"), load_tokenizer("tiny")

    def generate(prompts: list[str]) -> list[Sample]:
        samples = []
        for prompt in prompts:
            messages = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            tokens = model.generate(torch.tensor([ids]), do_sample=True, max_new_tokens=16)[0].tolist()
            mask = [0.0] * len(ids) + [1.0] * (len(tokens) - len(ids))
            reply = tokenizer.decode(tokens[len(ids) :], skip_special_tokens=True)
            samples.append(Sample(prompt, reply, tokens, mask))
        return samples

    def reward(sample: Sample) -> float:
        """1 for a reply with an even number."""
        numbers = re.findall(r"\d+", sample.response)
        return float(bool(numbers) and int(numbers[-1]) % 2 == 0)

    buffer = DataBuffer([f"What is {n} * {n}?" for n in range(2, 50)], seed=0)
    config = RolloutConfig(
        batch_size=4,
        n_samples_per_prompt=3,
        generate_fn=generate,
        reward_fn=reward,
        filter_fn=check_reward_nonzero_std,
    )
    batches = list(itertools.islice(generate_rollout_batches(buffer, config), steps))
    for batch in batches:
        groups = sorted(set(batch.metadata["group_indices"]))
        print(f"step {batch.metadata['step_id']}: kept groups {groups}")
        print(f"  rewards {[int(reward) for reward in batch.rewards]}, reply lengths {batch.response_lengths}")
    return batches


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    main(**vars(parser.parse_args()))
