"""An environment without mistakes. Each other file here makes one mistake in it; the part of the file's name before
`__` is the check that finds it.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rollouts import Message, Task, ToolCall, reward, tool


@dataclass
class Sums:
    """Add two numbers."""

    digits: int = 2  # digits of each number

    reward_range = (0.0, 1.0)

    def __post_init__(self):
        self.task = self.folder = None
        self.calls = 0

    def tasks(self, split, rng):
        while True:
            first, second = self.draw(rng)
            yield Task(self.question(first, second), answer=first + second, id=f"{first}+{second}")

    def demonstrations(self, split, rng):
        while True:
            first, second = self.draw(rng)
            call = ToolCall("add", {"first": first, "second": second}, id="call_0")
            total = str(first + second)
            yield [
                Message("user", self.question(first, second)),
                Message("assistant", "", [call]),
                Message("tool", total, tool_call_id=call.id, name=call.name),
                Message("assistant", total),
            ]

    def draw(self, rng):
        return rng.randrange(10**self.digits), rng.randrange(10**self.digits)

    def question(self, first, second):
        return f"What is {first} plus {second}?"

    def setup(self, task):
        self.task = task
        self.folder = Path(tempfile.mkdtemp(prefix="sums"))

    def close(self):
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def state(self):
        return {"calls": self.calls}

    def restore(self, state):
        self.calls = state["calls"]

    @tool
    def add(self, first: int, second: int) -> int:
        """Add two numbers."""
        self.calls += 1
        return first + second

    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        self.calls += 1
        if word != "plus":
            raise ValueError("only the word plus is known")
        return f"to add (call {self.calls})"

    @reward
    def correct(self, task, trajectory):
        return float(trajectory.last_text.strip() == str(task.answer))
