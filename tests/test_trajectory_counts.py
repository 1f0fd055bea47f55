"""The counts in the metrics of a trajectory that a test makes by hand, and of one that an engine played."""

from __future__ import annotations

import msgspec
import pytest

from rollouts.types import Message, Task, ToolCall, Trajectory

PROMPT = [Message("user", "1 + 1?"), Message("assistant", "2"), Message("user", "2 + 2?")]
CALLS = [ToolCall("add", {"a": 2, "b": 2}, "c1"), ToolCall("add", {"a": 2}, "c2")]
REST = [
    Message("assistant", "", CALLS),
    Message("tool", "4", tool_call_id="c1", name="add"),
    Message("tool", "Error: missing argument: b", tool_call_id="c2", name="add"),
    Message("user", "Error: this is no tool"),
    Message("assistant", "4"),
]


def test_a_trajectory_made_by_hand_counts_the_messages_after_the_prompt():
    task = Task(PROMPT)
    found = Trajectory(task, [*task.messages, *REST])
    assert found.metrics == {"turns": 2.0, "tool_calls": 2.0, "tool_failures": 1.0}
    assert found.turns == 2
    assert Trajectory(task, task.messages).metrics == dict.fromkeys(found.metrics, 0.0)


def test_a_role_s_conversation_does_not_begin_with_the_prompt():
    found = Trajectory(Task(PROMPT), [Message("system", "You are black."), *REST], role="black")
    assert found.turns == 2 and found.metrics["tool_calls"] == 2.0


@pytest.mark.parametrize("given", [{"turns": 7.0}, {"turns": 0.0, "tool_calls": 0.0, "tool_failures": 0.0}])
def test_given_counts_stay_also_in_files(given):
    task = Task(PROMPT)
    found = Trajectory(task, [*task.messages, *REST], metrics=given)
    assert found.metrics == given
    assert msgspec.json.decode(msgspec.json.encode(found), type=Trajectory).metrics == given
    assert msgspec.structs.replace(found, error="late").metrics == given
