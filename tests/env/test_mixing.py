from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.env.mixing import Verdict, mix, read_verdict
from rollouts.errors import RewardError
from rollouts.types import Score


class Scalar:
    """A number as numpy and torch have them."""

    def __float__(self) -> float:
        return 0.25


class Row:
    def __float__(self) -> float:
        raise TypeError("only one element tensors can be converted")


@pytest.mark.parametrize(
    ("returned", "value"), [(1, 1.0), (True, 1.0), (False, 0.0), (0.5, 0.5), (None, None), (Scalar(), 0.25)]
)
def test_what_counts_as_a_reward(returned: Any, value: float | None) -> None:
    assert read_verdict("r", 1.0, returned).value == value


@pytest.mark.parametrize("returned", [math.nan, math.inf, -math.inf, "1", [1.0], {}, Row(), 1j, 10**400])
def test_what_does_not_is_an_error_with_the_rewards_name(returned: Any) -> None:
    with pytest.raises(RewardError, match="reward 'brevity' returned"):
        read_verdict("brevity", 1.0, returned)
    with pytest.raises(RewardError, match="reward 'brevity' returned"):
        read_verdict("brevity", 1.0, Score(returned))
    with pytest.raises(RewardError, match=r"reward 'brevity.words' returned"):
        read_verdict("brevity", 1.0, Score(1.0, {"words": returned}))


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), max_size=6))
def test_the_sum_is_weighted(pairs: list[tuple[float, float]]) -> None:
    score = mix([Verdict(f"r{n}", weight, value) for n, (weight, value) in enumerate(pairs)])
    assert score.value == pytest.approx(math.fsum(w * v for w, v in pairs))
    assert score.parts == {f"r{n}": value for n, (_, value) in enumerate(pairs)}


def test_parts_keep_their_names_and_a_clash_gets_the_alias() -> None:
    verdicts = [
        read_verdict("correct", 1.0, Score(1.0, {"format": 0.5, "extra": 2.0}), "env"),
        read_verdict("correct", 1.0, 0.0, "other"),
        read_verdict("format", 1.0, 0.0),
    ]
    assert mix(verdicts).parts == {
        "correct": 1.0,
        "other.correct": 0.0,
        "format": 0.0,
        "correct.format": 0.5,
        "extra": 2.0,
    }
    assert mix([Verdict("a", 1, 1.0), Verdict("a", 1, 2.0), Verdict("a", 1, 3.0)]).parts == {
        "a": 1.0,
        "reward.a": 2.0,
        "reward.reward.a": 3.0,
    }


def test_policies_for_what_could_not_be_judged() -> None:
    verdicts = [Verdict("a", 1.0, 1.0), Verdict("b", -2.0, None, why="no words")]
    dropped = mix(verdicts)
    assert dropped.value is None and dropped.parts == {"a": 1.0, "b": None}
    assert dropped.why == "b could not judge: no words"
    assert mix(verdicts, "zero").value == 1.0 and mix(verdicts, "zero").parts["b"] is None
    with pytest.raises(RewardError, match="'b' could not judge a rollout: no words"):
        mix(verdicts, "raise")


def test_a_groups_rewards_are_added_to_a_score() -> None:
    base = mix([Verdict("a", 1.0, 1.0, why="fine")])
    total = mix([Verdict("rank", 0.5, 2.0)], base=base)
    assert (total.value, total.parts, total.why) == (2.0, {"a": 1.0, "rank": 2.0}, "a: fine")
    assert mix([Verdict("rank", 0.5, 2.0)], base=Score(None)).value is None
    assert base.parts == {"a": 1.0}, "the argument is not changed"
