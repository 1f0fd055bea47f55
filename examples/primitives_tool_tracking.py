"""Tool calls over several turns, with primitives: your own parser, executor, tracker and end of a conversation.

    python examples/primitives_tool_tracking.py          # seconds on a CPU, offline

It samples conversations until one of them has several turns, prints it, and prints how often the tool was called and
how often it failed. A reward may use these numbers: they are in `rollout.metadata`.
"""

import argparse
import itertools
import random
from collections.abc import Sequence
from typing import Any

from rollouts_calculator import Calculator, evaluate

import rollouts.primitives as rp


def execute(tool_calls: Sequence[rp.ToolCall], tools: Any) -> list[str]:
    """Run calls in a way of your own: a text for each call. An error is a text too, which the model reads."""
    results = []
    for call in tool_calls:
        try:
            results.append(evaluate(str(call.arguments.get("expression", ""))))
        except ValueError as error:
            results.append(f"Error: {error}")
    return results


def track(rollout: rp.Rollout) -> dict[str, int]:
    """What is kept in the metadata of a rollout."""
    results = [message.text for message in rollout.conversation.messages if message.role == "tool"]
    return {"calls": len(rollout.tool_calls), "failures": sum(text.startswith("Error") for text in results)}


def main(conversations: int = 16, seed: int = 0) -> list[rp.Rollout]:
    """Sample. Returns the rollouts."""
    model, tokenizer = rp.load_model("tiny"), rp.load_tokenizer("tiny")
    environment = Calculator(digits=1)
    found = []
    for number, task in enumerate(itertools.islice(environment.tasks("eval", random.Random(seed)), conversations)):
        conversation = rp.Conversation(task.messages, [environment.calculator])
        rollout = rp.create_multiturn_rollout(
            model,
            tokenizer,
            conversation,
            rp.GenerationConfig(max_tokens=48, max_turns=4, seed=1000 * seed + number),
            tool_parser=rp.parse_xml_tools,
            tool_executor=execute,
            tool_tracker=track,
            stop_condition=lambda conversation: "DONE" in conversation.messages[-1].text,
            metadata={"answer": task.answer},
        )
        found.append(rollout)
    print(rp.format_rollout(max(found, key=lambda rollout: len(rollout.turns))))
    totals = {name: sum(rollout.metadata[name] for rollout in found) for name in ("calls", "failures")}
    print(f"{conversations} conversations: {totals['calls']} calls, {totals['failures']} of them failed")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    main(given.conversations, given.seed)
