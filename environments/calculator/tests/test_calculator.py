from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("rollouts_calculator") is None:  # a checkout in which the package is not installed
    sys.path.insert(0, str(Path(__file__).parents[1]))

from rollouts_calculator import Calculator, evaluate

from rollouts.env.checks import check_environment
from rollouts.env.mixing import env_term
from rollouts.env.schema import tool_schema
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, Trajectory


def test_the_environment_is_usable_as_it_is_written() -> None:
    check_environment(Calculator, [env_term()])
    check_environment(Calculator(), [env_term()])
    function = tool_schema(Calculator().calculator)["function"]
    assert function["description"] == "Evaluate an arithmetic expression."
    assert function["parameters"]["properties"]["expression"]["type"] == "string"


def test_tasks_are_endless_bounded_and_reproducible() -> None:
    environment = Calculator(digits=3, operators="+-*")
    tasks = list(itertools.islice(environment.tasks("train", random.Random(1)), 300))
    assert tasks == list(itertools.islice(environment.tasks("train", random.Random(1)), 300))
    assert {task.prompt.split()[3] for task in tasks} == {"+", "-", "*"}
    for task in tasks:
        expression = task.prompt.removeprefix("What is ").removesuffix("?")
        assert eval(expression) == task.answer
        assert all(int(word) < 1000 for word in expression.split()[::2])


def test_the_default_only_multiplies() -> None:
    tasks = itertools.islice(Calculator().tasks("train", random.Random(0)), 50)
    assert all(" * " in task.prompt for task in tasks)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2146", 1.0),
        ("The answer is 2146.", 1.0),
        ("37 * 58 = 2146", 1.0),
        ("2146 or 2147", 0.0),
        ("", 0.0),
        ("x", 0.0),
    ],
)
def test_the_reward_reads_the_last_number(text: str, expected: float) -> None:
    task = Task("What is 37 * 58?", answer=2146)
    trajectory = Trajectory(task, [*task.messages, Message("assistant", text)])
    assert Calculator().correct(task, trajectory) == expected


def test_the_metric_sees_the_tool() -> None:
    task = Task("What is 1 * 1?", answer=1)
    assert Calculator().used_tool(Trajectory(task, [])) == 0.0
    assert Calculator().used_tool(Trajectory(task, [], metrics={"tool_calls": 2.0})) == 1.0


def test_demonstrations_are_right_and_use_the_tool() -> None:
    environment = Calculator(operators="+-*")
    for conversation in itertools.islice(environment.demonstrations("train", random.Random(3)), 50):
        assert [m.role for m in conversation] == ["user", "assistant", "tool", "assistant"]
        task = Task(conversation[0].text, answer=int(conversation[2].text))
        (call,) = conversation[1].tool_calls
        assert environment.calculator(**call.arguments) == conversation[2].text
        assert conversation[2].tool_call_id == call.id
        assert environment.correct(task, Trajectory(task, conversation)) == 1.0


@given(st.integers(-99999, 99999), st.sampled_from(["+", "-", "*", "//", "%", "/"]), st.integers(1, 9999))
def test_evaluate_agrees_with_python(first: int, operator: str, second: int) -> None:
    expression = f"({first} {operator} {second}) * 2 - -1"
    assert evaluate(expression) == str(eval(expression))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("2.0 ** 99999", "too large"),
        ("10 ** 1000 * 10 ** 1000", "too large"),
        ("(-8) ** 0.5", "no real power"),
        ("0 ** -1", "division by zero"),
        ("__import__('os')", "not understood"),
        ("x + 1", "not understood"),
        ("True + 1", "not understood"),
        ("'a' * 3", "not understood"),
        ("1 +", "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("1; 2", "';' is not understood"),
        ("1,000 + 1", "',' is not understood"),
        ("1if 2else 3", "'i' is not understood"),
        ("5(3)", "not understood"),
        ("\x00", "not understood"),
        ("(" * 400 + "1" + ")" * 400, "not an arithmetic expression"),
        ("1" * 2000, "characters"),
    ],
)
def test_evaluate_refuses(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(expression)


@given(st.text(max_size=40))
def test_evaluate_raises_nothing_but_value_errors(text: str) -> None:
    try:
        assert isinstance(evaluate(text), str)
    except ValueError:
        pass


@pytest.mark.parametrize("settings", [{"digits": 0}, {"operators": "+/"}, {"operators": ""}])
def test_settings_that_make_no_sense(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--env"):
        Calculator(**settings)
