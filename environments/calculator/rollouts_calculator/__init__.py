"""Arithmetic with one tool, a small environment in which an agent can learn.

The prompt is a question such as "What is 37 * 58?", and the model has a calculator. The reward is 1 if the last number
of its last message is the answer. There is no partial credit, and no reward for using the tool (`used_tool` is only
logged).

    rollouts run --env calculator --env.digits 3 --env.operators "+-*"
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rollouts.env import metric, reward, tool, tool_use
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, Trajectory
from rollouts_calculator.arithmetic import evaluate

__all__ = ["Calculator", "evaluate"]

OPERATORS = "+-*"


@dataclass
class Calculator:
    """Arithmetic with one tool."""

    digits: int = 2  # each number has at most this many digits
    operators: str = "*"  # any of + - *; each task uses one

    def __post_init__(self) -> None:
        if self.digits < 1:
            raise ConfigError(f"--env.digits {self.digits}: expected at least 1")
        unknown = sorted(set(self.operators) - set(OPERATORS))
        if unknown or not self.operators:
            raise ConfigError(
                f"--env.operators {self.operators!r}: expected some of {' '.join(OPERATORS)}, such as '+-'"
            )

    def tasks(self, split: str, rng: random.Random) -> Iterator[Task]:
        """Endless random questions. Both splits have the same distribution."""
        while True:
            expression = self._draw(rng)
            yield Task(f"What is {expression}?", answer=int(evaluate(expression)))

    def demonstrations(self, split: str, rng: random.Random) -> Iterator[list[Message]]:
        """Endless conversations of an expert, who calls the calculator and then answers with the number."""
        while True:
            expression = self._draw(rng)
            result = evaluate(expression)
            turn = tool_use("calculator", {"expression": expression}, result)
            yield [Message("user", f"What is {expression}?"), *turn, Message("assistant", result)]

    @tool(timeout_seconds=5)
    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: numbers with + - * / // % ** and parentheses, such as 12 * (3 + 4)
        """
        return evaluate(expression)

    @reward
    def correct(self, task: Task, trajectory: Trajectory) -> float:
        """1 if the last number of the last message is the answer, else 0."""
        return float(re.findall(r"-?\d+", trajectory.last_text)[-1:] == [str(task.answer)])

    @metric
    def used_tool(self, trajectory: Trajectory) -> float:
        """1 if the model called the calculator, else 0."""
        return float(trajectory.metrics.get("tool_calls", 0.0) > 0)

    def _draw(self, rng: random.Random) -> str:
        first, second = rng.randrange(10**self.digits), rng.randrange(10**self.digits)
        return f"{first} {rng.choice(self.operators)} {second}"
