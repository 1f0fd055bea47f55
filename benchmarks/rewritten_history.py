"""Seconds of a GRPO training step on rows whose template rewrites history: as a forest, and row by row.

    OMP_NUM_THREADS=1 python benchmarks/rewritten_history.py --model tiny
    OMP_NUM_THREADS=1 python benchmarks/rewritten_history.py --model 58m --steps 2 --members 4

One group of 8 members with a prompt of 200 tokens. A rollout has 6 turns of 150 sampled tokens, of which 100 are
thinking that the template leaves out of later history, and a tool result of 20 tokens after each turn. So each turn is
a row, and a row has the turns before it without their thinking. `forest` computes what rows share once, and `rows`
every row for itself. `group` is what sharing the prompt of the group alone would compute; it only counts tokens. The
sides take turns, and the first step of each is warm-up; its gradient norms are compared. Random weights, fp32.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from random_model import save_random_qwen3

from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends.optimizer import TorchSettings
from rollouts.training.backends.torch import TorchBackend, create_torch_backend
from rollouts.training.batches import TrainBatch
from rollouts.training.batching import make_batch
from rollouts.training.forest import count_nodes
from rollouts.types import Sample

PROMPT, TURNS, THINKING, ANSWER, RESULT = 200, 6, 100, 50, 20
TOKENS = 1 << 15


def make_rows(members: int) -> TrainBatch:
    """The rows of one group."""
    generator = random.Random(0)

    def draw(count: int) -> list[int]:
        return [generator.randrange(400) for _ in range(count)]

    prompt, samples = draw(PROMPT), []
    for member in range(members):
        history = list(prompt)
        for _ in range(TURNS):
            thinking, answer = draw(THINKING), draw(ANSWER)
            sampled = len(thinking) + len(answer)
            samples.append(
                Sample(
                    tokens=history + thinking + answer,
                    loss_mask=[0.0] * len(history) + [1.0] * sampled,
                    rollout_log_probs=[0.0] * len(history) + [-6.0] * sampled,
                    policy_versions=[-1] * len(history) + [0] * sampled,
                    reward=float(member % 2),
                    group_index=0,
                    rollout_index=member,
                    prompt_length=PROMPT,
                )
            )
            history += answer + draw(RESULT)
    advantages = [generator.gauss(0.0, 1.0) for _ in range(members)]
    return make_batch(samples, advantages, aggregation="token_mean", step=0)


def count_tokens(batch: TrainBatch) -> dict[str, int]:
    """The tokens that each side computes."""
    rows = [row.tokens for row in batch.rows]
    whole = sum(map(len, rows))
    return {"forest": count_nodes(rows), "group": whole - (len(rows) - 1) * PROMPT, "rows": whole}


def step_seconds(backend: TorchBackend, batch: TrainBatch) -> tuple[float, float]:
    """CPU seconds of one step, and its gradient norm."""
    before = time.process_time()
    backend.forward_backward(batch).wait()
    norm = backend.optim_step().wait().metrics["optim/grad_norm"]
    return time.process_time() - before, norm


def main() -> None:
    """Print tokens and seconds of each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "58m"], default="tiny")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--members", type=int, default=8)
    options = parser.parse_args()
    batch = make_rows(options.members)
    with tempfile.TemporaryDirectory() as folder:
        model = save_random_qwen3(Path(folder), tiny_shape=options.model == "tiny")
        run = (model, 0, 100, 1e-7, 0, TOKENS, {"main": GRPO}, None)
        sides = {
            name: create_torch_backend(*run, settings=TorchSettings(share_prefix=name == "forest"))
            for name in ("forest", "rows")
        }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    one, other = (step_seconds(backend, batch)[1] for backend in sides.values())
    assert abs(one - other) <= 1e-4 * one, f"gradient norms {one} and {other}"
    for _ in range(options.steps):
        for name, backend in sides.items():
            seconds[name].append(step_seconds(backend, batch)[0])
    for backend in sides.values():
        backend.close()
    for name, tokens in count_tokens(batch).items():
        median = f"{statistics.median(seconds[name]):.3f} s" if name in seconds else "not run"
        print(f"{name:8} {tokens:7,} tokens  {median}")
    print(f"rows / forest: {statistics.median(seconds['rows']) / statistics.median(seconds['forest']):.2f}")


if __name__ == "__main__":
    main()
