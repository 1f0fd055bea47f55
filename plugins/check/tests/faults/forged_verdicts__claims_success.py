"""The agent itself says whether it has solved the task."""

from __future__ import annotations

from sums import Sums

from rollouts import Message, ToolCall, reward, tool


class Fault(Sums):
    def setup(self, task):
        super().setup(task)
        self.is_solved = False

    def demonstrations(self, split, rng):
        for messages in super().demonstrations(split, rng):
            finish = ToolCall("finish", {"success": True}, id="call_1")
            yield [*messages[:-1], Message("assistant", "", [finish]),
                   Message("tool", "finished", tool_call_id=finish.id, name=finish.name), messages[-1]]  # fmt: skip

    def state(self):
        return {"calls": self.calls, "is_solved": self.is_solved}

    def restore(self, state):
        self.calls, self.is_solved = state["calls"], state["is_solved"]

    @tool
    def finish(self, success: bool) -> str:
        """End the task."""
        self.is_solved = success
        return "finished"

    @reward
    def correct(self, task, trajectory):
        return float(self.is_solved)
