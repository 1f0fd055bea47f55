"""A code that only a tool knows can be tried as often as one likes."""

from __future__ import annotations

from sums import Sums

from rollouts import Message, ToolCall, reward, tool


class Fault(Sums):
    def setup(self, task):
        super().setup(task)
        self.is_open = False

    def demonstrations(self, split, rng):
        while True:
            first, second = self.draw(rng)
            call = ToolCall("open", {"code": f"code {first * 31 + second}"}, id="call_0")
            opened = Message("tool", "open", tool_call_id=call.id, name=call.name)
            yield [
                Message("user", self.question(first, second)),
                Message("assistant", "", [call]),
                opened,
                Message("assistant", "open"),
            ]

    def state(self):
        return {"calls": self.calls, "is_open": self.is_open}

    def restore(self, state):
        self.calls, self.is_open = state["calls"], state["is_open"]

    @tool
    def open(self, code: str) -> str:
        """Open the door."""
        first, second = map(int, self.task.id.split("+"))
        self.is_open = self.is_open or code == f"code {first * 31 + second}"
        return "open" if self.is_open else "closed"

    @reward
    def correct(self):
        return float(self.is_open)
