"""A whole training with primitives, in which every part is a function of yours.

    python examples/primitives_custom_pipeline.py                   # about half a minute on a CPU, offline
    python examples/primitives_custom_pipeline.py --iterations 30   # continues from the last checkpoint

It prints a line for each iteration; every fifth one has the score on held-out tasks.
"""

import argparse
import functools
import itertools
import random
import statistics
from pathlib import Path

import torch
from rollouts_calculator import Calculator

import rollouts.primitives as rp
from rollouts.training import create_adamw_optimizer

ENVIRONMENT = Calculator(digits=1)
TRAIN, HELD_OUT = rp.split_prompts(list(itertools.islice(ENVIRONMENT.tasks("train", random.Random(0)), 300)), 0.1)
CONFIG = rp.GenerationConfig(max_tokens=32, max_turns=3)
right = rp.create_regex_reward(r"-?\d+")


def reward(rollout: rp.Rollout) -> float:
    return right(rollout) - 0.1 * len(rollout.tool_calls[1:])  # one call is enough


def advantage(rewards: torch.Tensor) -> torch.Tensor:
    return (rewards - rewards.median()) / (rewards.std() + 0.1)


def loss(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return -(logprobs - old_logprobs).exp().clamp(max=2.0) * advantages  # one value per token: no mean


def evaluate(state: rp.TrainingState) -> dict[str, float]:
    config, how = CONFIG._replace(temperature=0.0), {"tools": [ENVIRONMENT.calculator], "reward_fn": right}
    found = rp.create_batch_rollouts(state.model, state.tokenizer, HELD_OUT[:16], config, **how)
    return {"held_out": statistics.fmean(rollout.rewards for rollout in found)}


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return {"optim/clipped": float(norm > 0.5)}


def main(iterations: int = 20, folder: str = "checkpoints/primitives", seed: int = 0) -> rp.TrainingState:
    """Train, or continue. Returns the last state."""
    model, tokenizer = rp.load_model("tiny"), rp.load_tokenizer("tiny")
    state = rp.TrainingState(model, tokenizer, create_adamw_optimizer(model, 1e-3), rp.create_reference_model(model))
    if Path(folder).is_dir():
        state = rp.load_checkpoint(state, folder)
    kl_fn = rp.create_adaptive_kl(confidence_threshold=0.1)
    algorithm = functools.partial(rp.create_algorithm_config, advantage_fn=advantage, loss_fn=loss, kl_fn=kl_fn)
    return rp.train(
        initial_state=state,
        prompt_loader=rp.create_prompt_loader(TRAIN, 8, seed=seed),
        num_iterations=iterations,
        gen_config=CONFIG._replace(seed=seed),
        algorithm_config=lambda iteration: algorithm("grpo", {"kl_coef": 0.05 if iteration < 10 else 0.01}),
        reward_fn=reward,
        ref_model_update_fn=rp.create_periodic_updater(update_every=10),
        checkpoint_fn=functools.partial(rp.save_checkpoint, folder=folder),
        eval_fn=evaluate,
        logger=rp.log_to_console,
        eval_every=5,
        optimizer_step_fn=step,
        tools=[ENVIRONMENT.calculator],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20)
    main(parser.parse_args().iterations)
