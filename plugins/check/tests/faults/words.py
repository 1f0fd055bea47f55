"""An environment without a mistake that looks as if it had some: the answer is in the prompt in capitals, a tool takes
lists, one answers a list or a text, and one refuses a call with KeyError.
"""

from __future__ import annotations

from rollouts import Message, Task, reward, tool

WORDS = ("no", "yes", "left", "apple", "river", "seven", "green", "table")


class Words:
    def tasks(self, split, rng):
        while True:
            word = rng.choice(WORDS)
            yield Task(f"Write this word in small letters: {word.upper()}", answer=word)

    def demonstrations(self, split, rng):
        for task in self.tasks(split, rng):
            yield [Message("user", task.prompt), Message("assistant", task.answer)]

    @tool
    def join(self, letters: list[str], breaks: list[int] | str) -> str:
        """Join letters to a word.

        Args:
            letters: the letters
            breaks: where to break the word, as numbers or as a text
        """
        return "-".join(letters) + str(breaks)

    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        return {"1": "one", "plus": "to add"}[word]

    @reward
    def correct(self, task, trajectory):
        return float(trajectory.last_text.strip() == task.answer)
