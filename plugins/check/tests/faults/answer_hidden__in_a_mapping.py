"""The answer is a mapping, and a tool shows it with other data."""

from __future__ import annotations

import json

from sums import Sums

from rollouts import Message, Task, reward, tool


class Fault(Sums):
    def tasks(self, split, rng):
        for task in super().tasks(split, rng):
            yield Task(task.prompt, answer={"total": task.answer, "unit": "one"}, id=task.id)

    def demonstrations(self, split, rng):
        for messages in super().demonstrations(split, rng):
            yield [*messages[:-1], Message("assistant", json.dumps({"total": int(messages[-1].text), "unit": "one"}))]

    @tool
    def sheet(self) -> dict:
        """The sheet of the question."""
        return {"page": 3, "question": self.task.id, "solved": {"unit": "one", "total": self.task.answer["total"]}}

    @reward
    def correct(self, task, trajectory):
        try:
            return float(json.loads(trajectory.last_text) == task.answer)
        except ValueError:
            return 0.0
