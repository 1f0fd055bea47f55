"""A mapping as the answer, whose parts are in the prompt, and a tool that shows one of them: an environment without a
mistake. Some tasks have no ids and one prompt, which is a note.
"""

from __future__ import annotations

import json

from rollouts import Message, Task, reward, tool

THINGS = ("tea", "cake", "soup", "bread")


class Orders:
    def tasks(self, split, rng):
        number = 0
        while True:
            number += 1
            thing, count = rng.choice(THINGS), rng.randint(2, 99)
            prompt = "What do you want?" if number % 50 == 0 else f"Order {number}: {count} pieces of {thing}."
            yield Task(prompt, answer={"thing": thing, "count": count, "price": count * len(thing)})

    def demonstrations(self, split, rng):
        for task in self.tasks(split, rng):
            yield [Message("user", task.prompt), Message("assistant", json.dumps(task.answer))]

    def setup(self, task):
        self.thing = task.answer["thing"]

    @tool
    def kitchen(self) -> dict:
        """What the kitchen is making."""
        return {"thing": self.thing, "minutes": 5}

    @reward
    def correct(self, task, trajectory):
        try:
            return float(json.loads(trajectory.last_text) == task.answer)
        except ValueError:
            return 0.0
