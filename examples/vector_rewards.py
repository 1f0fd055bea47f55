"""Vector rewards: several rewards for each rollout, and a function of your own that makes one number of them.

    python examples/vector_rewards.py               # half a minute on a laptop's CPU, offline
    python examples/vector_rewards.py --steps 5

The first reward is the environment's own: was the answer correct? The second one is negative if the reply is long. The
third one likes the tool. `gated` counts the second and the third only where the first is 1. Each part has a curve of
its own in metrics.jsonl:

    before brevity -0.01  correct +0.28  used_tool +0.28
    after  brevity -0.03  correct +0.96  used_tool +0.97
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from torch import Tensor

import rollouts
from rollouts import Trajectory


def brevity(trajectory: Trajectory, *, target_tokens: int = 20) -> float:
    """0 for a reply of at most `target_tokens`, less for longer ones."""
    return min(0.0, 1 - trajectory.sampled_count / target_tokens)


def used_tool(trajectory: Trajectory) -> float:
    """1 if the model called a tool."""
    return float(trajectory.metrics["tool_calls"] > 0)


def gated(parts: Tensor, weights: Tensor, *, at_least: float = 1.0) -> Tensor:
    """The first reward [J]; the others are added where the first is at least `at_least`. `parts` [J, P]."""
    is_open = parts[:, 0] >= at_least
    return parts[:, 0] * weights[0] + is_open * (parts[:, 1:] @ weights[1:])


def main(steps: int = 40, out: str = "") -> dict[str, Any]:
    out = out or tempfile.mkdtemp()
    summary = rollouts.run(
        env="calculator",
        reward=["env:1", (brevity, 0.2), (used_tool, 0.1)],
        mix=gated,
        steps=steps,
        eval_tasks=100,
        out=out,
    )
    for when in ("before", "after"):
        parts = summary["evaluation"][when]["parts"]
        print(f"{when:6}", "  ".join(f"{name} {value:+.2f}" for name, value in parts.items()))
    return summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    main(**vars(parser.parse_args()))
