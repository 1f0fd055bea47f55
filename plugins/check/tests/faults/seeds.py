"""Games that have one prompt and differ in their seeds, which are their ids: an environment without a mistake. A few
questions are in both splits by chance, with numbers as ids, which is a note.
"""

from __future__ import annotations

import random

from sums import Sums

from rollouts import Message, Task, reward


class Seeds:
    """Guess whether the number of the seed is high or low."""

    def tasks(self, split, rng):
        while True:
            seed = f"{split} {rng.randrange(10**6)}"
            yield Task("Is the number high or low?", answer=self.side(seed), id=seed)

    def demonstrations(self, split, rng):
        for task in self.tasks(split, rng):
            yield [Message("user", task.prompt), Message("assistant", task.answer)]

    def side(self, seed):
        return random.Random(seed).choice(["high", "low"])

    @reward
    def correct(self, task, trajectory):
        return float(trajectory.last_text.strip() == self.side(task.id))


class Numbered(Sums):
    def tasks(self, split, rng):
        for number, task in enumerate(super().tasks(split, rng)):
            yield Task(task.prompt, task.answer, id=f"{split} {number}")
