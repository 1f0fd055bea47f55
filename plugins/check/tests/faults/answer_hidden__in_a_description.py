"""All tasks have one answer, which the description of a tool's argument has too."""

from typing import Annotated

from msgspec import Meta

from rollouts import Message, Task, reward, tool


class Fault:
    PASSWORD = "swordfish"

    def tasks(self, split, rng):
        while True:
            yield Task(f"Find the password of door {rng.randrange(1000)}.", answer=self.PASSWORD)

    def demonstrations(self, split, rng):
        for task in self.tasks(split, rng):
            yield [Message("user", task.prompt), Message("assistant", task.answer)]

    @tool
    def knock(self, word: Annotated[str, Meta(description=f"what to say, such as {PASSWORD}")]) -> str:
        """Say a word at the door."""
        return "nothing happens"

    @reward
    def correct(self, task, trajectory):
        return float(trajectory.last_text.strip() == task.answer)
