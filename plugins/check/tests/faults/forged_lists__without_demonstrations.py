"""The answer may be anywhere in a reply, and there are no demonstrations."""

from __future__ import annotations

from rollouts import Task, reward


class Fault:
    def tasks(self, split, rng):
        while True:
            first, second = rng.randrange(10, 50), rng.randrange(10, 50)
            yield Task(f"What is {first} plus {second}?", answer=first + second)

    @reward
    def correct(self, task, trajectory):
        return float(str(task.answer) in trajectory.last_text.split())
