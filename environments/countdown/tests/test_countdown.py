from __future__ import annotations

import itertools
import random
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts_countdown import Countdown, value_of

from rollouts.check import check_environment_class
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, Trajectory

TASK = Task("Use 3, 4 and 7 to make 25.", info={"numbers": [3, 4, 7], "target": 25})


def test_the_contract() -> None:
    check_environment_class(Countdown, tasks=2, skip=["wheel", "imports"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 * 7 + 4", 1.0),
        ("4 + 7 * 3", 1.0),
        ("I multiply first.\n(7 * 3) + 4", 1.0),
        ("25", 0.0),  # uses none of the numbers
        ("3 * 7 + 4 + 0 * 4", 0.0),  # uses a number twice
        ("3 + 4 + 7", 0.0),
        ("3 * 7 + 4 = 25", 0.0),
        ("37 - 4 * 3", 0.0),  # joins digits
        ("3 * 7 + 4 or 7 * 3 + 4", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward(text: str, expected: float) -> None:
    trajectory = Trajectory(TASK, [*TASK.messages, Message("assistant", text)])
    assert Countdown().solved(TASK, trajectory) == expected


@pytest.mark.parametrize("settings", [{}, {"numbers": 2, "largest": 4}, {"numbers": 6, "largest": 99}])
def test_each_task_has_a_solution(settings: dict[str, int]) -> None:
    env = Countdown(**settings)
    tasks = env.tasks("train", random.Random(5))
    talks = env.demonstrations("train", random.Random(5))
    for task, talk in itertools.islice(zip(tasks, talks, strict=False), 200):
        assert talk[0] == task.messages[0] and len(task.info["numbers"]) == env.numbers
        assert env.solved(task, Trajectory(task, talk)) == 1.0
        assert task.info["target"] not in task.info["numbers"]


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+-*/"), inner),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_a_value_is_exact(expression: str) -> None:
    numbers = re.findall(r"\d+", expression)
    try:
        expected = eval(re.sub(r"(\d+)", r"F(\1)", expression), {"F": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ValueError):
            value_of(expression)
    else:
        assert value_of(expression) == (expected, sorted(map(int, numbers)))


@given(st.text(max_size=60))
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        value_of(text)
    except ValueError:
        pass


@pytest.mark.parametrize("text", ["__import__('os')", "9 ** 9", "1 if 1 else 2", "1" * 300, "1 / 0", "True", "-3", ""])
def test_only_arithmetic_is_accepted(text: str) -> None:
    with pytest.raises(ValueError):
        value_of(text)


@pytest.mark.parametrize("settings", [{"numbers": 1}, {"numbers": 7}, {"largest": 1}])
def test_settings_that_make_no_sense(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"--env\."):
        Countdown(**settings)
