from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from rollouts_python import PROBLEMS, Python

from rollouts.check import check_environment_class
from rollouts.errors import ConfigError
from rollouts.sandboxes import Sandbox, SubprocessSandboxes
from rollouts.types import Task


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    opened = SubprocessSandboxes().open()
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "only",
    [pytest.param(["settings", "episode"], marks=pytest.mark.slow), pytest.param([], marks=pytest.mark.nightly)],
    ids=["quick", "all"],
)
def test_the_contract(only: list[str]) -> None:
    """The other checks run hundreds of programs."""
    check_environment_class(Python, tests=1, tasks=1, only=only, skip=["wheel", "imports", "forged-calls"])


def score(sandbox: Sandbox, problem: str, program: str) -> tuple[float | None, float | None]:
    env, task = Python(), Task("Write it.", info={"problem": problem, "seed": 5})
    env.setup(task, sandbox)
    env.write(program)
    found = env.correct(task)
    return found.value, found.parts["share"]


def test_every_solution_is_right_and_no_other_one_is(sandbox: Sandbox) -> None:
    for name, problem in PROBLEMS.items():
        assert score(sandbox, name, problem.solution) == (1.0, 1.0)
        others = [other.solution for other in PROBLEMS.values() if other.draw == problem.draw and other != problem]
        assert score(sandbox, name, others[0])[0] == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "",
        "def solve(n): return str(2 * n)",
        "def solve(n): return 2.0 * n",
        "def solve(n): raise SystemExit(0)",
        "print('[1.0]' * 10)\ndef solve(n): return None",
        "import os; os._exit(0)",
        "while True: pass",
        "def solve(n): print('0'); return 2 * n",
    ],
    ids=["empty", "text", "float", "exit", "verdict", "os exit", "loop", "prints"],
)
def test_a_program_that_is_wrong(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr("rollouts_python.SECONDS", 2.0)
    value, share = score(sandbox, "double", program)
    assert value == 0.0 and share is not None and share < 1.0


def test_a_task_shows_two_right_examples_that_do_not_judge_it() -> None:
    env = Python()
    for task in itertools.islice(env.tasks("train", random.Random(0)), 50):
        name, names = task.info["problem"], {}  # type: ignore[var-annotated]
        exec(PROBLEMS[name].solution, names)
        examples = [line for line in task.prompt.splitlines() if line.startswith("solve(")]  # type: ignore[union-attr]
        assert len(examples) == 2 and all(eval(line, names) for line in examples)
        judged = env._inputs(name, task.info["seed"], env.tests, skip=2)
        assert len(judged) == env.tests
        assert not any(line.startswith(f"solve({', '.join(map(repr, each))})") for each in judged for line in examples)


@pytest.mark.parametrize("settings", [{"problems": ("halve",)}, {"tests": 0}])
def test_settings_that_make_no_sense(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"--env\."):
        Python(**settings)  # type: ignore[arg-type]
