"""Write a Python function and test it in a sandbox.

The task describes a function `solve`. The model writes `solution.py` with `write`, tries it with `run`, and ends with a
message. Then `solve` is called with inputs that the model has not seen. The reward is 1 if every output is right.

The inputs go into the sandbox, and the outputs come back. The right outputs never enter the sandbox, so a program
cannot read them, and it cannot write its own reward.

    rollouts run --env python --sandbox bubblewrap
"""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollouts.env import reward, tool, tool_use
from rollouts.errors import ConfigError
from rollouts.sandboxes import Sandbox
from rollouts.types import Message, Score, Task

__all__ = ["PROBLEMS", "Problem", "Python"]

EXAMPLES = 2  # how many inputs a task shows
SECONDS = 20.0  # how long a judged program may take
RUNNER = """\
import json, sys
from solution import solve
for line in sys.stdin:
    print()
    print(json.dumps(solve(*json.loads(line))), flush=True)
"""


class Problem(NamedTuple):
    """A function to write: its description with an example, an input drawn at random, and a solution."""

    text: str
    draw: Callable[[random.Random], list[Any]]
    solution: str


def _numbers(rng: random.Random) -> list[Any]:
    return [[rng.randrange(-20, 21) for _ in range(rng.randrange(9))]]


def _word(rng: random.Random) -> list[Any]:
    return ["".join(rng.choices("abcde", k=rng.randrange(9)))]


def _number(rng: random.Random) -> list[Any]:
    return [rng.randrange(1, 200)]


PROBLEMS = {
    "double": Problem("two times the number n", _number, "def solve(n): return 2 * n"),
    "reverse": Problem("the text in reverse order", _word, "def solve(text): return text[::-1]"),
    "even_sum": Problem(
        "the sum of the even numbers in a list", _numbers, "def solve(xs): return sum(x for x in xs if x % 2 == 0)"
    ),
    "vowels": Problem(
        "how many letters of the text are a or e", _word, "def solve(text): return sum(c in 'ae' for c in text)"
    ),
    "unique": Problem(
        "the list without repeated numbers, in the order of their first occurrence",
        _numbers,
        "def solve(xs): return list(dict.fromkeys(xs))",
    ),
    "palindrome": Problem(
        "true if the text is equal to its reverse, else false", _word, "def solve(text): return text == text[::-1]"
    ),
    "divisors": Problem(
        "the sorted list of the divisors of n",
        _number,
        "def solve(n): return [d for d in range(1, n + 1) if n % d == 0]",
    ),
    "running_max": Problem(
        "the list in which each number is replaced by the largest one up to it",
        _numbers,
        "import itertools\ndef solve(xs): return list(itertools.accumulate(xs, max))",
    ),
    "most_common": Problem(
        "the letter that occurs most often in the text, the first of them in the alphabet if there are several, and an "
        "empty text for an empty text",
        _word,
        "def solve(text): return min(set(text), key=lambda c: (-text.count(c), c), default='')",
    ),
    "primes": Problem(
        "how many prime numbers are at most n",
        _number,
        "def solve(n): return sum(all(p % q for q in range(2, p)) for p in range(2, n + 1))",
    ),
}


@dataclass
class Python:
    """Write a Python function and test it in a sandbox."""

    problems: tuple[str, ...] = ()  # names of problems to choose from; all if empty
    tests: int = 10  # how many inputs the function is judged with

    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        unknown = [name for name in self.problems if name not in PROBLEMS]
        if unknown:
            raise ConfigError(f"--env.problems: there is no {unknown[0]!r}; there are {', '.join(PROBLEMS)}")
        if self.tests < 1:
            raise ConfigError(f"--env.tests {self.tests}: expected at least 1")

    def tasks(self, split: str, rng: random.Random) -> Iterator[Task]:
        """Endless tasks: a problem, two examples, and the seed of the inputs that judge it."""
        while True:
            name, seed = rng.choice(self.problems or tuple(PROBLEMS)), rng.getrandbits(48)
            problem = PROBLEMS[name]
            inputs = self._inputs(name, seed, EXAMPLES)
            examples = "\n".join(
                f"solve({', '.join(map(repr, arguments))}) == {output!r}"
                for arguments, output in zip(inputs, _outputs(problem.solution, inputs), strict=True)
            )
            prompt = f"Write solution.py with a function `solve` that returns {problem.text}.\n{examples}"
            yield Task(prompt, info={"problem": name, "seed": seed}, id=f"{name} {seed}")

    def demonstrations(self, split: str, rng: random.Random) -> Iterator[list[Message]]:
        """Endless conversations of an expert, who writes the solution and says so."""
        for task in self.tasks(split, rng):
            turn = tool_use("write", {"text": PROBLEMS[task.info["problem"]].solution}, "written")
            yield [*task.messages, *turn, Message("assistant", "Done.")]

    def setup(self, task: Task, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    @tool
    def write(self, text: str) -> str:
        """Write the file solution.py.

        Args:
            text: the whole program
        """
        self.sandbox.write("solution.py", text)
        return "written"

    @tool(timeout_seconds=20)
    def run(self, code: str) -> str:
        """Run a Python program next to solution.py, and read what it prints.

        Args:
            code: such as `from solution import solve; print(solve(3))`
        """
        return self.sandbox.exec(["python3", "-c", code], seconds=10).text

    @reward
    def correct(self, task: Task) -> Score:
        """1 if every output is right, else 0. The share of right outputs is logged as the part `share`."""
        inputs = self._inputs(task.info["problem"], task.info["seed"], self.tests, skip=EXAMPLES)
        lines = "".join(json.dumps(arguments) + "\n" for arguments in inputs)
        result = self.sandbox.exec(["python3", "-c", RUNNER], stdin=lines, seconds=SECONDS)
        printed = [line for line in result.stdout.splitlines() if line]
        expected = _outputs(PROBLEMS[task.info["problem"]].solution, inputs)
        right = [len(printed) == len(expected) and _same(*pair) for pair in zip(printed, expected, strict=False)]
        share = sum(right) / len(expected)
        return Score(float(share == 1.0), {"share": share})

    def _inputs(self, name: str, seed: int, count: int, skip: int = 0) -> list[list[Any]]:
        """Different inputs if there are enough of them. The first ones are shown in the task."""
        rng, found = random.Random(seed), collections.OrderedDict[str, list[Any]]()
        for _ in range(50 * (skip + count)):
            arguments = PROBLEMS[name].draw(rng)
            found.setdefault(json.dumps(arguments), arguments)
            if len(found) == skip + count:
                break
        return list(found.values())[skip:]


def _outputs(solution: str, inputs: list[list[Any]]) -> list[Any]:
    """What this module's own solution returns. It is never a program of the model."""
    names: dict[str, Any] = {}
    exec(solution, names)
    return [names["solve"](*arguments) for arguments in inputs]


def _same(line: str, output: Any) -> bool:
    """Whether the line is the output as JSON, and of the same type: 1 is not true."""
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return type(found) is type(output) and found == output
