"""An environment of the tests on the server of ors-sdk: `python ors_server.py PORT`."""

from __future__ import annotations

import sys

from ors import Environment, Server, ToolOutput, tool
from ors.types import TextBlock
from pydantic import BaseModel


class Guess(BaseModel):
    """A guess."""

    number: int


class Guessing(Environment):
    """Guess a number."""

    def setup(self) -> None:
        """No guess so far."""
        self.tries = 0

    @classmethod
    def list_splits(cls) -> list[str]:
        """Two splits."""
        return ["train", "test"]

    @classmethod
    def list_tasks(cls, split: str) -> list[dict]:
        """Few tasks."""
        return [{"number": number} for number in ((7, 8, 9) if split == "train" else (3,))]

    def get_prompt(self) -> list[TextBlock]:
        """The prompt."""
        return [TextBlock(text=f"Guess the number before {self.task_spec['number'] + 1}.")]

    @tool
    def guess(self, given: Guess) -> ToolOutput:
        """Guess the number."""
        self.tries += 1
        if given.number == -3:
            raise ValueError("there is no negative number here")
        is_right = given.number == self.task_spec["number"]
        text = "right" if is_right else "wrong " + "x" * 9000
        reward = 1.0 if is_right else -0.25 * self.tries
        return ToolOutput(blocks=[TextBlock(text=text)], reward=reward, finished=is_right or self.tries == 3)

    @tool
    def look(self) -> ToolOutput:
        """Look at the task. It gives no reward."""
        return ToolOutput(blocks=[TextBlock(text="a number")])


if __name__ == "__main__":
    Server([Guessing]).run(host="127.0.0.1", port=int(sys.argv[1]))
