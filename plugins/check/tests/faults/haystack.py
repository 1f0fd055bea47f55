"""Finding something in a text, and two guesses by a tool: an environment without a mistake
that gets a note, because the answer is in the prompt.
"""

from __future__ import annotations

from rollouts import Message, Task, ToolCall, reward, tool

COLORS = ("red", "blue", "green", "white")


class Haystack:
    def tasks(self, split, rng):
        while True:
            code = rng.randrange(10**6)
            rooms = [f"The color of room {rng.randrange(1000)} is {rng.choice(COLORS)}." for _ in range(30)]
            text = rooms[: rng.randint(3, 30)]
            text.insert(rng.randrange(len(text)), f"The code of the safe is {code}.")
            yield Task("\n".join([*text, "What is the code of the safe?"]), answer=str(code))

    def demonstrations(self, split, rng):
        for task in self.tasks(split, rng):
            call = ToolCall("open_safe", {"code": task.answer}, id="call_0")
            yield [
                Message("user", task.prompt),
                Message("assistant", "", [call]),
                Message("tool", "noted", tool_call_id=call.id, name=call.name),
                Message("assistant", "It is open."),
            ]

    def setup(self, task):
        self.left, self.is_open, self.code = 2, False, task.answer

    @tool
    def open_safe(self, code: str) -> str:
        """Try a code. You have two trials."""
        self.left -= 1
        self.is_open = self.is_open or (self.left >= 0 and code == self.code)
        return "noted"

    @reward
    def opened(self, task, trajectory):
        return float(self.is_open)
