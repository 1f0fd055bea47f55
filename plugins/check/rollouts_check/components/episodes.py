"""Invented episodes for rewards and filters: plain ones, and those that no author expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rollouts.types import Message, Segment, Status, Task, ToolCall, Trajectory

LONG = 200_000  # characters of a long reply
TASK = Task("What is 12 * 7?", answer="84", info={"level": 1}, id="a task")
REPLIES = {
    "a plain reply": "It is 84.",
    "a wrong reply": " I do not know.\n",
    "an empty reply": "",
    "spaces": " \n\t",
    "unicode": "é 👩‍🚀 \u202e ﷽ \u0000",
    "half a character": "\ud800",
    "a very long reply": "word " * (LONG // 5),
    "one very long word": "x" * LONG,
    "signs": "[[]] {} () ** \\boxed{ ``` <answer> $$ %s {0}",
    "numbers": "nan -inf 1e999 0x10 1/0 ٣ ½",
}


class Played(NamedTuple):
    """An invented episode, and what is special about it. `env` is its environment object, if a reward may name it."""

    words: str
    trajectory: Trajectory
    env: Any = None


def unusual_episodes(task: Task, env: Any) -> list[Played]:
    """Episodes that are cut off, call tools, or have no reply."""
    call = Message("assistant", "", [ToolCall("search", {"query": "stars"}, "call_1")])
    bad = Message("assistant", "", [ToolCall("", {}, "call_2", error="it is not valid JSON")])
    answers = [Message("tool", "Error: not found", tool_call_id="call_1", name="search")]
    several = invented_trajectory(task, "It is 84.", before=[call, *answers, bad, Message("user", "Try again.")])
    cut = invented_trajectory(task, "It is 8", status=Status.TRUNCATED)
    silent = Trajectory(task, task.messages, status=Status.TRUNCATED)
    words = ("an episode with calls of tools", "a reply that the token limit cut off", "an episode without a reply")
    return [Played(each, trajectory, env) for each, trajectory in zip(words, (several, cut, silent), strict=True)]


def invented_trajectory(
    task: Task, reply: str, *, before: Sequence[Message] = (), status: Status = Status.COMPLETED, live: int = 3
) -> Trajectory:
    """A trajectory that ends with this reply, whose segment has `live` trained tokens."""
    messages = [*task.messages, *before, Message("assistant", reply)]
    mask = [0.0, 0.0] + [1.0] * live
    tokens = [5, 6, *range(7, 7 + live)]
    segment = Segment(tokens, mask, [-0.5 * weight for weight in mask], [-1 if weight == 0 else 0 for weight in mask])
    return Trajectory(task, messages, [segment], status)
