import re
from dataclasses import dataclass

from rollouts import Task, reward, tool


@dataclass
class MyEnv:
    """Arithmetic with one tool."""

    digits: int = 2  # --env.digits

    def tasks(self, split, rng):  # iterable of Task; may be endless
        while True:
            a, b = rng.randrange(10**self.digits), rng.randrange(10**self.digits)
            yield Task(f"What is {a} * {b}?", answer=a * b)

    @tool(timeout_seconds=5)
    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    @reward
    def correct(self, task, trajectory):
        return float(re.findall(r"-?\d+", trajectory.last_text)[-1:] == [str(task.answer)])
