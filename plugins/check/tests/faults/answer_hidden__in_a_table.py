"""The description of a tool's argument has a table with the answers of all tasks."""

from typing import Annotated, ClassVar

from msgspec import Meta

from rollouts import Message, Task, reward, tool


class Fault:
    CAPITALS: ClassVar = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Peru": "Lima"}

    def tasks(self, split, rng):
        while True:
            country = rng.choice(sorted(self.CAPITALS))
            yield Task(f"What is the capital of {country}?", answer=self.CAPITALS[country])

    def demonstrations(self, split, rng):
        for task in self.tasks(split, rng):
            yield [Message("user", task.prompt), Message("assistant", task.answer)]

    @tool
    def check(self, city: Annotated[str, Meta(description=f"a city of {CAPITALS}")]) -> str:
        """Check a city."""
        return "checked"

    @reward
    def correct(self, task, trajectory):
        return float(trajectory.last_text.strip() == task.answer)
