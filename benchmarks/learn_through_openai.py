"""Does the tiny model learn the calculator through an agent that is written with OpenAI's client?

    pip install openai
    OMP_NUM_THREADS=1 python benchmarks/learn_through_openai.py                  # five seeds, a few minutes each
    OMP_NUM_THREADS=1 python benchmarks/learn_through_openai.py --seeds 0 --steps 24

Tasks, reward and settings are those of the main job, `rollouts run --env calculator --loss grpo`. Only the agent is
another one: `play`, which knows nothing of rollouts. With `--direct`, the environment's own loop plays, for comparison.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI
from rollouts_calculator import Calculator, evaluate

import rollouts
from rollouts import Task
from rollouts.env.schema import tool_schema

TOOLS: list[Any] = [tool_schema(Calculator().calculator)]


@dataclass
class ThroughOpenAI(Calculator):
    """The calculator, played by an agent with a client of its own."""

    async def rollout(self, task: Task, model: Any) -> None:
        """Play the task."""
        # A client loads certificates, which takes longer than a short episode; this address needs none.
        async with model.serve() as endpoint, httpx.AsyncClient(verify=False, timeout=600) as http:
            client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0, http_client=http)
            await play(client, task.prompt)


async def play(client: AsyncOpenAI, prompt: str) -> None:
    """The agent: it asks the model until it calls no tool."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    while True:
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        messages.append(message.to_dict())
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call)})


def calculate(call: Any) -> str:
    """What the model reads after a call."""
    try:
        return evaluate(**json.loads(call.function.arguments))
    except (AttributeError, TypeError, ValueError) as error:
        return f"Error: {error}"


def learn(seed: int, steps: int, direct: bool) -> dict[str, Any]:
    """One run: the reward on held-out tasks before and after, sampled and greedy."""
    env = "calculator" if direct else {"name": ThroughOpenAI}
    out = Path(tempfile.mkdtemp()) / "run"
    summary = rollouts.run(env=env, loss="grpo", steps=steps, seed=seed, out=str(out))
    shutil.rmtree(out.parent)
    before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
    figures = {key: [before[key], after[key]] for key in ("reward_mean", "greedy_mean")}
    return {"seed": seed, "direct": direct, "steps": steps, **figures, "cpu_seconds": summary["cpu_seconds"]}


def main(argv: Sequence[str] | None = None) -> None:
    """Run each seed, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=120, help="the main job's: 120")
    parser.add_argument("--direct", action="store_true", help="the environment's own loop")
    arguments = parser.parse_args(argv)
    for seed in arguments.seeds:
        row = learn(seed, arguments.steps, arguments.direct)
        print(json.dumps(row), flush=True)
        print(f"seed {seed}: {row['reward_mean'][0]:.3f} -> {row['reward_mean'][1]:.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
