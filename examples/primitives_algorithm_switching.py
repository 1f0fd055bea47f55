"""Another algorithm in the middle of a training, with primitives: the algorithm is a function of the iteration.

    python examples/primitives_algorithm_switching.py    # about half a minute on a CPU, offline

GRPO with a strong KL to the reference, then with a weak one, then "dapo": DPO on the best and the worst rollout of each
prompt. It prints a line for each iteration.
"""

import argparse
import itertools
import random

from rollouts_calculator import Calculator

import rollouts.primitives as rp
from rollouts.training import create_adamw_optimizer


def main(iterations: int = 21, seed: int = 0) -> rp.TrainingState:
    """Train. Returns the last state."""
    model, tokenizer = rp.load_model("tiny"), rp.load_tokenizer("tiny")
    optimizer = create_adamw_optimizer(model, lr=1e-3)
    state = rp.TrainingState(model, tokenizer, optimizer, rp.create_reference_model(model))
    environment = Calculator(digits=1)
    tasks = list(itertools.islice(environment.tasks("train", random.Random(seed)), 8 * iterations))

    def get_algorithm(iteration: int) -> rp.AlgorithmConfig:
        if iteration < iterations // 3:
            return rp.create_algorithm_config("grpo", {"kl_coef": 0.2})
        if iteration < 2 * iterations // 3:
            return rp.create_algorithm_config("grpo", {"kl_coef": 0.05})
        return rp.create_algorithm_config("dapo", {"beta": 0.1})

    def log(stats: rp.TrainingStats) -> None:
        print(f"{get_algorithm(stats.iteration).name:6}", end="")
        rp.log_to_console(stats)

    return rp.train(
        initial_state=state,
        prompt_loader=rp.create_prompt_loader(tasks, 8, seed=seed),
        num_iterations=iterations,
        gen_config=rp.GenerationConfig(max_tokens=32, max_turns=3, seed=seed),
        algorithm_config=get_algorithm,
        reward_fn=rp.create_regex_reward(r"-?\d+"),
        logger=log,
        tools=[environment.calculator],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=21)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    main(given.iterations, given.seed)
