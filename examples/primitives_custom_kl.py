"""A KL of your own and a reference that moves, with primitives.

    python examples/primitives_custom_kl.py              # about half a minute on a CPU, offline

The KL of a token is cut at one nat, so that single surprises do not rule the loss. The reference is a moving average of
the policy: it slows the policy, and does not hold it. It prints the mean reward, the KL to the reference, and the KL to
the model at the beginning.
"""

import argparse
import itertools
import random
import statistics

from rollouts_calculator import Calculator

import rollouts.primitives as rp
from rollouts.training import create_adamw_optimizer


def main(iterations: int = 20, seed: int = 0) -> tuple[float, float]:
    """Train. Returns the last KL to the moving reference, and to the model at the beginning."""
    model, tokenizer = rp.load_model("tiny"), rp.load_tokenizer("tiny")
    beginning, reference = rp.create_reference_model(model), rp.create_reference_model(model)
    state = rp.TrainingState(model, tokenizer, create_adamw_optimizer(model, lr=1e-3), reference)
    environment = Calculator(digits=1)
    tasks = environment.tasks("train", random.Random(seed))
    config = rp.create_algorithm_config("grpo", {"kl_coef": 0.05}, kl_fn=rp.create_truncated_kl(threshold=1.0))
    follow = rp.create_ema_updater(decay=0.8)
    kl = (0.0, 0.0)
    for iteration in range(iterations):
        rollouts = rp.create_batch_rollouts(
            model,
            tokenizer,
            list(itertools.islice(tasks, 8)),
            rp.GenerationConfig(max_tokens=32, max_turns=3, seed=1000 * seed + iteration),
            samples_per_prompt=8,
            tools=[environment.calculator],
            ref_model=state.ref_model,
            reward_fn=rp.create_regex_reward(r"-?\d+"),
        )
        turns = [turn for rollout in rollouts[:16] for turn in rollout.turns or (rollout.generation,)]
        far = [float(rp.compute_reverse_kl(t.logprobs, rp.get_reference_logprobs(beginning, t))) for t in turns]
        state, stats = rp.training_step(state, rollouts, config)
        state = state._replace(ref_model=rp.update_reference_model(state.ref_model, model, update_fn=follow))
        kl = (stats.kl, statistics.fmean(far))
        print(f"iteration {iteration:2}  reward {stats.mean_reward:.3f}  kl {kl[0]:.4f}  to the beginning {kl[1]:.4f}")
    return kl


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    main(given.iterations, given.seed)
