"""A tool takes any number of answers, and one of them has to be right."""

from __future__ import annotations

from sums import Sums

from rollouts import Message, ToolCall, reward, tool


class Fault(Sums):
    def __post_init__(self):
        super().__post_init__()
        self.is_solved = False

    def demonstrations(self, split, rng):
        for messages in super().demonstrations(split, rng):
            call = ToolCall("submit", {"total": int(messages[-1].text)}, id="call_1")
            said = Message("tool", "noted", tool_call_id=call.id, name=call.name)
            yield [*messages[:-1], Message("assistant", "", [call]), said, Message("assistant", "done")]

    def state(self):
        return {"calls": self.calls, "is_solved": self.is_solved}

    def restore(self, state):
        self.calls, self.is_solved = state["calls"], state["is_solved"]

    @tool
    def submit(self, total: int) -> str:
        """Submit the total."""
        self.is_solved = self.is_solved or total == self.task.answer
        return "noted"

    @reward
    def correct(self, task, trajectory):
        return float(self.is_solved)
