"""CPU seconds of a GRPO training step with some groups without an advantage: with and without their backward pass.

    OMP_NUM_THREADS=1 python benchmarks/flat_groups.py --model tiny
    OMP_NUM_THREADS=1 python benchmarks/flat_groups.py --model 58m --steps 2

Both sides take the same step (`forward_backward` and `optim_step` of the torch backend) on the same rows: 8 groups x 8
rollouts of random ids. In `--flat` of the groups, all rewards are equal. `skipped` is GRPO, which runs these groups
only forward. `full` is GRPO with one more term, which is 0 and does not name the advantages, so every row has a
backward pass. The sides take turns, and the first step of each is warm-up. Random weights, fp32, one optimizer step per
batch. Before the first step, the gradients of both sides are compared. Generation is not included: it is the same on
both sides.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from random_model import save_random_qwen3

from rollouts.training.algorithms.algorithm import Algorithm, Term
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends.optimizer import TorchSettings
from rollouts.training.backends.torch import TorchBackend, create_torch_backend
from rollouts.training.batches import TrainBatch
from rollouts.training.batching import make_batch
from rollouts.types import Sample

GROUPS, MEMBERS = 8, 8
TOKENS = 16384


def zero(logprobs: torch.Tensor) -> torch.Tensor:
    """A term that is 0, and makes every row run backward."""
    return logprobs * 0.0


SIDES = {"skipped": GRPO, "full": GRPO._replace(terms=(*GRPO.terms, Term(zero)))}


def make_rows(flat: int, prompt: int, reply: int) -> TrainBatch:
    """Groups of rollouts with one prompt each. The first `flat` groups have no advantage."""
    generator = random.Random(0)
    samples, advantages = [], []
    for group in range(GROUPS):
        shared = [generator.randrange(400) for _ in range(prompt)]
        for member in range(MEMBERS):
            length = generator.randint(max(1, reply // 2), reply)
            samples.append(
                Sample(
                    tokens=shared + [generator.randrange(400) for _ in range(length)],
                    loss_mask=[0.0] * prompt + [1.0] * length,
                    rollout_log_probs=[0.0] * prompt + [-6.0] * length,
                    policy_versions=[-1] * prompt + [0] * length,
                    group_index=group,
                    rollout_index=len(samples),
                    prompt_length=prompt,
                )
            )
            advantages.append(0.0 if group < flat else (-1.0) ** member)
    return make_batch(samples, advantages, aggregation=GRPO.aggregation, step=0)


def gradient(backend: TorchBackend, batch: TrainBatch) -> torch.Tensor:
    """The gradient of the batch for all weights, as one vector."""
    backend.forward_backward(batch).wait()
    return torch.cat([p.grad.reshape(-1) for p in backend.model.parameters() if p.grad is not None])


def step_seconds(backend: TorchBackend, batch: TrainBatch) -> float:
    """The CPU seconds of one step, in all threads."""
    start = time.process_time()
    backend.forward_backward(batch).wait()
    backend.optim_step().wait()
    return time.process_time() - start


def make_backend(model: str, algorithm: Algorithm) -> TorchBackend:
    """A backend for this model with a tiny learning rate."""
    return create_torch_backend(
        model, 0, 100, 1e-7, 0, TOKENS, {"main": algorithm}, None, settings=TorchSettings(device="cpu")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "58m"), default="tiny", help="a shape; the weights are random")
    parser.add_argument("--flat", type=int, default=6, help=f"groups of {GROUPS} without an advantage")
    parser.add_argument("--steps", type=int, default=10, help="steps measured on each side")
    parser.add_argument("--prompt", type=int, default=69, help="tokens of a prompt")
    parser.add_argument("--reply", type=int, default=32, help="tokens of a reply, at most")
    parser.add_argument("--json", default="", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_rows(options.flat, options.prompt, options.reply)
    with tempfile.TemporaryDirectory() as folder:
        model = save_random_qwen3(Path(folder), tiny_shape=options.model == "tiny")
        backends = {name: make_backend(model, algorithm) for name, algorithm in SIDES.items()}
    one, other = (gradient(backend, batch) for backend in backends.values())
    apart = float((one - other).norm() / other.norm().clamp(min=1e-30))
    for backend in backends.values():
        backend.optim_step().wait()
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(options.steps + 1):
        for name, backend in backends.items():
            seconds[name].append(step_seconds(backend, batch))
    for backend in backends.values():
        backend.close()
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    figures: dict[str, Any] = {"model": options.model, "flat_groups": options.flat, "gradients_apart": apart}
    figures |= {f"{name}_cpu_seconds": median for name, median in medians.items()}
    figures["ratio"] = medians["full"] / medians["skipped"]
    print(f"{options.model}, {options.flat} of {GROUPS} groups without an advantage, {options.steps} steps a side")
    for name, each in seconds.items():
        print(f"  {name:>8}: {medians[name]:.3f} CPU s a step (best {min(each[1:]):.3f}, worst {max(each[1:]):.3f})")
    print(f"  full / skipped: {figures['ratio']:.2f}; their gradients are {apart:.1e} apart")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
