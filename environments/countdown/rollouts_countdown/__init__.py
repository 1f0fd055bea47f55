"""Reach a target number with each of the given numbers, a game of arithmetic.

The prompt is "Use 3, 4 and 7 to make 25.", and the model answers with an expression such as `3 * 7 + 4`. The reward is
1 if the last line of its last message is an expression that has the target as its value, and that uses each number
exactly once. The expression is parsed by `ast`, and only numbers with + - * / and parentheses are accepted: nothing
of the reply is run.

    rollouts run --env countdown --env.numbers 3 --mode sft+rl --sft.steps 100
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from rollouts.env import metric, reward
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, Trajectory

__all__ = ["Countdown", "value_of"]

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CHARACTERS_MAX = 200


@dataclass
class Countdown:
    """Make a target number out of given numbers, each used once."""

    numbers: int = 3  # how many numbers are given: 2 to 6
    largest: int = 9  # the largest number that is given

    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        if not 2 <= self.numbers <= 6:
            raise ConfigError(f"--env.numbers {self.numbers}: expected 2 to 6")
        if self.largest < 2:
            raise ConfigError(f"--env.largest {self.largest}: expected at least 2")

    def tasks(self, split: str, rng: random.Random) -> Iterator[Task]:
        """Endless random games. Each has a solution. Both splits have the same distribution."""
        while True:
            yield self._draw(rng)[0]

    def demonstrations(self, split: str, rng: random.Random) -> Iterator[list[Message]]:
        """Endless games with the expression that they were made from."""
        while True:
            task, expression = self._draw(rng)
            yield [*task.messages, Message("assistant", expression)]

    @reward
    def solved(self, task: Task, trajectory: Trajectory) -> float:
        """1 if the last line uses each number once and has the target as its value, else 0."""
        answer = _answer(trajectory)
        return float(answer is not None and answer[0] == task.info["target"] and answer[1] == task.info["numbers"])

    @metric
    def well_formed(self, trajectory: Trajectory) -> float:
        """1 if the last line is an expression, whatever its value, else 0."""
        return float(_answer(trajectory) is not None)

    def _draw(self, rng: random.Random) -> tuple[Task, str]:
        """A game, and an expression that solves it: numbers and signs, joined from left to right."""
        while True:
            numbers = [rng.randint(1, self.largest) for _ in range(self.numbers)]
            expression, value = str(numbers[0]), numbers[0]
            for number in numbers[1:]:
                sign = rng.choice(list(SIGNS))
                inner = f"({expression})" if sign == "*" and not expression.isdigit() else expression
                expression, value = f"{inner} {sign} {number}", SIGNS[sign](value, number)
            given = sorted(numbers)
            if value > 0 and value not in given:
                listed = f"{', '.join(map(str, given[:-1]))} and {given[-1]}"
                return Task(f"Use {listed} to make {value}.", info={"numbers": given, "target": value}), expression


def _answer(trajectory: Trajectory) -> tuple[Fraction, list[int]] | None:
    """The value and the sorted numbers of the last line, or None if it is no expression."""
    lines = trajectory.last_text.strip().splitlines()
    try:
        return value_of(lines[-1]) if lines else None
    except ValueError:
        return None


def value_of(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression, and its numbers, sorted. Raises ValueError for anything else.

    >>> value_of("(3 + 4) * 7")
    (Fraction(49, 1), [3, 4, 7])
    """
    if len(expression) > CHARACTERS_MAX:
        raise ValueError(f"an expression has at most {CHARACTERS_MAX} characters")
    numbers: list[int] = []

    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        raise ValueError("an expression has numbers, + - * / and parentheses")

    try:
        value = walk(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise ValueError(f"no expression: {error}") from None
    return value, sorted(numbers)
