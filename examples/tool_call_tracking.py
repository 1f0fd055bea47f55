"""Tool-call tracking: count calls and failures of tools over several turns, and look at the conversations.

    python examples/tool_call_tracking.py               # half a minute on a laptop's CPU, offline
    python examples/tool_call_tracking.py --steps 5

The tool of this environment fails for one task in ten. The model gets the error as the tool's message. The run counts
calls and failures; `unanswered` is a metric of our own. A @metric is logged and never trained:

    step  0  rollout/tool_calls 0.11  rollout/tool_fail_frac 0.29  metric/unanswered 0.03  reward/mean 0.08
    step 10  rollout/tool_calls 0.66  rollout/tool_fail_frac 0.26  metric/unanswered 0.17  reward/mean 0.47
    step 20  rollout/tool_calls 0.94  rollout/tool_fail_frac 0.00  metric/unanswered 0.00  reward/mean 0.91
    step 30  rollout/tool_calls 0.98  rollout/tool_fail_frac 0.03  metric/unanswered 0.03  reward/mean 0.92
    user: What is 85 * 7?
    assistant:  {'expression': '85 * 7'}
    tool: Error: TimeoutError: the calculator is busy
    assistant: </tool_call>
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rollouts_calculator import Calculator

import rollouts
from rollouts import Trajectory, metric, tool


class Unreliable(Calculator):
    """Arithmetic with a tool that does not always work."""

    @tool
    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: numbers with + - * / // % ** and parentheses, such as 12 * (3 + 4)
        """
        if expression.endswith("7"):
            raise TimeoutError("the calculator is busy")
        return super().calculator(expression)

    @metric
    def unanswered(self, trajectory: Trajectory) -> float:
        """1 if the last call of the episode failed."""
        results = [message.content for message in trajectory.messages if message.role == "tool"]
        return float("Error" in "".join(map(str, results[-1:])))


def main(steps: int = 40, out: str = "") -> dict[str, Any]:
    out = out or tempfile.mkdtemp()
    summary = rollouts.run(env=Unreliable, steps=steps, eval_tasks=0, out=out)
    names = ("rollout/tool_calls", "rollout/tool_fail_frac", "metric/unanswered", "reward/mean")
    for metrics in map(json.loads, Path(out, "metrics.jsonl").read_text().splitlines()[:: max(1, steps // 4)]):
        print(f"step {metrics['step']:2}", *(f"{name} {metrics[name]:.2f}" for name in names), sep="  ")
    episodes = Path(out, "trajectories", f"step_{steps - 1:06d}.jsonl").read_text().splitlines()
    failed = [episode for episode in map(json.loads, episodes) if episode["metrics"]["tool_failures"]]
    for message in failed[0]["messages"] if failed else []:
        calls = [call["arguments"] for call in message.get("tool_calls", [])]
        print(f"{message['role']}: {' '.join(message.get('content', '').split())}", *calls)
    return summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    main(**vars(parser.parse_args()))
