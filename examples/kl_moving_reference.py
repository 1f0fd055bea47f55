"""A KL term to a reference policy that moves: first with a frozen reference, then with one that follows the policy.

    python examples/kl_moving_reference.py               # half a minute on a laptop's CPU, offline
    python examples/kl_moving_reference.py --steps 5

`follow` is a rule of our own. It is called after every optimizer step and changes the reference in place. `ema` and
`every_n` are the engine's rules. A frozen reference holds the policy back; a moving one limits only how fast it moves:

    frozen  step  0  KL to the reference 0.000  reward 0.11
    frozen  step  5  KL to the reference 0.003  reward 0.33
    frozen  step 10  KL to the reference 0.010  reward 0.42
    frozen  step 15  KL to the reference 0.011  reward 0.36
    follow  step  0  KL to the reference 0.000  reward 0.11
    follow  step  5  KL to the reference 0.004  reward 0.33
    follow  step 10  KL to the reference 0.001  reward 0.56
    follow  step 15  KL to the reference 0.001  reward 0.58
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

import rollouts


def follow(reference: list[Tensor], policy: list[Tensor], version: int, *, steps: int = 5, share: float = 0.5) -> None:
    """Move the reference a part of the way to the policy, every few steps.

    Args:
        steps: from one move to the next
        share: the part of the way
    """
    if version and version % steps == 0:
        for theirs, ours in zip(reference, policy, strict=True):
            theirs.lerp_(ours.to(theirs.dtype), share)


def main(steps: int = 20, out: str = "") -> dict[str, list[float]]:
    out = out or tempfile.mkdtemp()
    references: dict[str, Any] = {"frozen": "frozen", "follow": {"name": follow, "steps": 2}}
    measured = {}
    for name, reference in references.items():
        rollouts.run(
            env="calculator",
            kl={"name": "rk3_loss", "coef": 3.0},
            reference=reference,
            steps=steps,
            eval_tasks=0,
            out=f"{out}/{name}",
        )
        lines = [json.loads(line) for line in Path(out, name, "metrics.jsonl").read_text().splitlines()]
        for metrics in lines[:: max(1, steps // 4)]:
            print(
                f"{name}  step {metrics['step']:2}  KL to the reference {metrics['policy/kl_ref']:.3f}  "
                f"reward {metrics['reward/mean']:.2f}"
            )
        measured[name] = [metrics["policy/kl_ref"] for metrics in lines]
    return measured


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
