"""Expressions keep the rows that the same expression in Python keeps, and can do nothing else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts_view.filters import Column, choose

from rollouts.errors import ConfigError

NAN = math.nan
COLUMNS = {
    "reward": Column("number", [0.0, 0.5, 1.0, NAN]),
    "tokens": Column("number", [10.0, 0.0, 30.0, 40.0]),
    "part.exact match": Column("number", [1.0, NAN, 0.0, 1.0]),
    "task": Column("text", ["What is 2 + 2?", "GCD of 4 and 6", "", "name: Ω"]),
    "status": Column("text", ["completed", "completed", "truncated", "aborted"]),
}


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", [0, 1, 2, 3]),
        ("reward > 0.5", [2]),
        ("reward != 1", [0, 1, 3]),
        ("reward == None", [3]),
        ("reward is not None and tokens >= 10", [0, 2]),
        ("0 < reward < 1", [1]),
        ("not reward > 0.2", [0, 3]),
        ("tokens * 2 - 20 == -reward", [0]),
        ("abs(reward - 1) < 0.1 or status == 'aborted'", [2, 3]),
        ('"gcd" in lower(task)', [1]),
        ("task == None", [2]),
        ('status in ["aborted", "truncated"]', [2, 3]),
        ("reward not in (0, 1)", [1, 3]),
        ('part["exact match"] == 1', [0, 3]),
        ("status > 'b' and True == (tokens > 5)", [0, 2]),
    ],
)
def test_what_an_expression_keeps(text, rows):
    assert list(choose(text, COLUMNS, 4)) == rows


OPERATORS = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
NUMBERS = st.one_of(st.sampled_from(["reward", "tokens", "(-reward)", "abs(reward)"]), st.integers(-3, 40).map(str))
COMPARED = st.tuples(NUMBERS, OPERATORS, NUMBERS).map(" ".join)
EXPRESSIONS = st.recursive(
    COMPARED,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(" ".join).map("({})".format),
        inner.map("(not {})".format),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_as_python_would(text):
    rows = zip(COLUMNS["reward"].values, COLUMNS["tokens"].values, strict=True)
    expected = [
        i for i, (reward, tokens) in enumerate(rows) if eval(text, {"reward": reward, "tokens": tokens, "abs": abs})
    ]
    assert list(choose(text, COLUMNS, 4)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rewrd > 1", "there is no column rewrd; did you mean: reward?"),
        ("reward", "it is a number, and must be true or false, such as: reward > 0.5"),
        ("reward >", "is no expression"),
        ("status > 3", "`status` is text and `3` is a number; they cannot be compared"),
        ("task + 'x' == 'y'", "`task` is text, and must be a number"),
        ("'a' * 1000000 == 'b'", "`'a'` is text, and must be a number"),
        ("tokens ** 9 ** 9 > 1", "cannot be used"),
        ("1 / tokens > 0.05", "division by zero"),
        ("reward is 1", "`is` is for None alone"),
        ("reward > None", "None is compared with == or !="),
        ("__import__('os').system('true') == 0", "cannot be used"),
        ("().__class__.__bases__ == 1", "there is no column ().__class__.__bases__"),
        ("[x for x in task] == 1", "cannot be used"),
        ("(lambda: 1)() == 1", "cannot be used"),
        ("lower(task, 1) == 'a'", "cannot be used"),
        ("f'{task}' == 'a'", "cannot be used"),
        ("(reward := 3) > 1", "cannot be used"),
        ("reward > 1j", "is neither a number nor text"),
        ("b'a' in task", "is neither a number nor text"),
        ("not " * 40 + "reward > 1", "nested deeper than"),
        ("(" * 210 + "1" + ")" * 210, "is no expression"),
        ("reward > 1" + " or reward > 1" * 60, "500 are the most"),
        ("reward > \x00", "is no expression"),
    ],
)
def test_everything_else_is_refused_with_its_reason(text, words):
    with pytest.raises(ConfigError) as refused:
        choose(text, COLUMNS, 4)
    assert words in str(refused.value)
