"""Your own loss: a function of a few tensors that returns one value per token. Its parameters name its inputs.

    python examples/own_loss.py               # half a minute on a laptop's CPU, offline
    python examples/own_loss.py --steps 5

`soft_clip` has no clipping. It adds a penalty that grows with the distance of the ratio from 1. The engine applies the
mask, the weights and the denominator. The example prints the reward, and the metric that the loss returns:

    step  0  reward 0.11  largest distance of the ratio from 1: 0.25
    step 10  reward 0.95  largest distance of the ratio from 1: 0.18
    step 20  reward 0.91  largest distance of the ratio from 1: 0.15
    step 30  reward 0.94  largest distance of the ratio from 1: 0.22
    step 39  reward 0.92  largest distance of the ratio from 1: 0.24
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

import rollouts


def soft_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, penalty: float = 2.0
) -> tuple[Tensor, dict[str, Any]]:
    """The policy gradient with a penalty on the ratio [T]: -r A + penalty (r - 1)^2.

    Args:
        penalty: how much a ratio away from 1 costs
    """
    ratio = (logprobs - old_logprobs).exp()
    away = (ratio - 1).abs()
    return -ratio * advantages + penalty * away**2, {"away_max": (away, "max")}


def main(steps: int = 40, out: str = "") -> dict[str, Any]:
    out = out or tempfile.mkdtemp()
    summary = rollouts.run(
        env="calculator",
        loss={"name": soft_clip, "penalty": 4.0},
        minibatches=2,  # two optimizer steps for each batch: in the second one the ratio is not 1
        steps=steps,
        eval_tasks=100,
        out=out,
    )
    for line in Path(out, "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if metrics["step"] % 10 == 0 or metrics["step"] == steps - 1:
            away, reward = metrics["policy/away_max"], metrics["reward/mean"]
            print(f"step {metrics['step']:2}  reward {reward:.2f}  largest distance of the ratio from 1: {away:.2f}")
    return summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    main(**vars(parser.parse_args()))
