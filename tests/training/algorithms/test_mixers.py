"""Reward mixers: the value of each, and its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.config.settings import REQUIRED
from rollouts.errors import ConfigError, TrainingError
from rollouts.plugins.signature import check_signature
from rollouts.training.algorithms.advantages import group_mean, group_norm
from rollouts.training.algorithms.calls import mixed_rewards
from rollouts.training.algorithms.rewards import lexicographic, minimum, normalised_sum, product, weighted_sum

ALL = [weighted_sum, minimum, product, lexicographic, normalised_sum]


def mix(function, parts, weights, **settings):
    rows = torch.tensor(parts, dtype=torch.float64)
    return function(rows, torch.tensor(weights, dtype=torch.float64), **settings).tolist()


def test_weighted_sum_is_what_the_engine_adds_up():
    assert mix(weighted_sum, [[1.0, 2.0], [0.0, 3.0]], [1.0, -0.1]) == pytest.approx([0.8, -0.3])


def test_minimum_is_as_good_as_the_worst():
    parts = [[1.0, 0.2], [0.5, 0.6]]
    assert mix(minimum, parts, [1.0, 1.0]) == [0.2, 0.5]
    assert mix(minimum, parts, [1.0, 10.0]) == [1.0, 0.5]
    assert mix(minimum, parts, [1.0, 0.0]) == [1.0, 0.5], "a weight of 0 leaves the reward out"
    assert mix(minimum, parts, [0.0, 0.0]) == [0.0, 0.0]
    sums = mix(weighted_sum, parts, [1.0, 1.0])  # control: the sum prefers the other one
    assert sums[0] > sums[1]


def test_product_takes_powers():
    assert mix(product, [[0.5, 4.0], [1.0, 0.0]], [2.0, 0.5]) == pytest.approx([0.5, 0.0])
    assert mix(product, [[0.0, 3.0]], [0.0, 1.0]) == [3.0], "a weight of 0 leaves the reward out"
    assert mix(product, [[0.25, 4.0]], [1.0, -1.0]) == pytest.approx([0.0625])


def test_product_refuses_what_has_no_power():
    with pytest.raises(TrainingError, match=r"product got a negative reward \(-0.5\)"):
        mix(product, [[1.0, -0.5]], [1.0, 1.0])
    with pytest.raises(TrainingError, match="0 with a weight below 0"):
        mix(product, [[1.0, 0.0]], [1.0, -1.0])
    assert mix(product, [[1.0, 0.0]], [-1.0, 1.0]) == [0.0]  # control


def test_lexicographic_lets_the_first_reward_decide():
    parts = [[1.0, 0.0], [0.0, 100.0], [1.0, 1.0]]
    assert mix(lexicographic, parts, [1.0, 1.0]) == [0.5, 0.0, 1.0]
    assert mix(weighted_sum, parts, [1.0, 1.0])[1] == 100.0  # control: the sum lets the second decide
    assert mix(lexicographic, [row[::-1] for row in parts], [1.0, 1.0]) == [0.0, 1.0, 0.5], "in their order"
    assert mix(lexicographic, parts, [0.001, 99.0]) == [0.5, 0.0, 1.0], "of a weight only the sign counts"


def test_lexicographic_ties_share_their_rank():
    assert mix(lexicographic, [[1.0], [0.5], [1.0], [0.0]], [1.0]) == [1.0, 0.5, 1.0, 0.0]
    assert mix(lexicographic, [[0.3], [0.1 + 0.2], [0.0]], [1.0]) == [1.0, 1.0, 0.0], "rounding is a tie"
    assert mix(lexicographic, [[2.0], [2.0]], [1.0]) == [0.0, 0.0]
    assert mix(lexicographic, [[2.0]], [1.0]) == [0.0]


def test_lexicographic_tolerance_lets_the_next_reward_decide():
    parts = [[0.95, 1.0], [1.0, 5.0], [0.5, 9.0]]
    assert mix(lexicographic, parts, [1.0, -1.0], tolerance=0.1) == [1.0, 0.5, 0.0]
    assert mix(lexicographic, parts, [1.0, -1.0]) == [0.5, 1.0, 0.0]  # control
    chain = [[1.0], [0.95], [0.9], [0.85]]
    assert mix(lexicographic, chain, [1.0], tolerance=0.05) == [1.0, 1.0, 0.0, 0.0], "a chain of ties has an end"


def test_lexicographic_direction_is_the_sign_of_the_weight():
    parts = [[1.0, 30.0], [1.0, 20.0], [0.0, 5.0]]
    assert mix(lexicographic, parts, [1.0, -0.1]) == [0.5, 1.0, 0.0]
    assert mix(lexicographic, parts, [1.0, 0.1]) == [1.0, 0.5, 0.0]
    assert mix(lexicographic, parts, [1.0, 0.0]) == [1.0, 1.0, 0.0], "a weight of 0 leaves the reward out"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=8))
def test_lexicographic_orders_as_tuples_do(rows):
    """Against the order of Python's tuples; the second reward is better when less."""
    ranks = mix(lexicographic, [list(map(float, row)) for row in rows], [1.0, -2.0, 0.5])
    levels = sorted({(a, -b, c) for a, b, c in rows})
    expected = [levels.index((a, -b, c)) / max(len(levels) - 1, 1) for a, b, c in rows]
    assert ranks == pytest.approx(expected) and all(0 <= rank <= 1 for rank in ranks)


def test_normalised_sum_is_the_sum_of_z_scores():
    parts = np.array([[1.0, 200.0], [0.0, 100.0], [0.5, 900.0], [0.0, 0.0]])
    scores = (parts - parts.mean(0)) / (parts.std(0, ddof=1) + 1e-4)
    assert mix(normalised_sum, parts.tolist(), [1.0, -0.5]) == pytest.approx((scores @ [1.0, -0.5]).tolist())
    assert mix(normalised_sum, [[1.0, 0.3], [0.0, 0.1 + 0.2]], [1.0, 1.0]) == pytest.approx(
        mix(normalised_sum, [[1.0, 0.0], [0.0, 0.0]], [1.0, 1.0])
    ), "a reward without spread adds nothing"
    assert mix(normalised_sum, [[1.0, 5.0]], [1.0, 1.0]) == [0.0]


def test_normalised_sum_keeps_what_weighted_sum_loses():
    """One reward is a hundred times larger: in the sum it drowns the other, whose order is the reverse."""
    parts = [[1.0, 0.0], [0.0, 1.0], [1.0, 100.0], [0.0, 101.0]]
    summed = group_norm(mix(weighted_sum, parts, [1.0, 1.0])).tolist()
    assert summed[0] == pytest.approx(summed[1]) and summed[2] == pytest.approx(summed[3])
    normalized = mix(normalised_sum, parts, [1.0, 1.0])
    assert normalized[0] - normalized[1] > 1.0 and normalized[2] - normalized[3] > 1.0
    # Two groups in which the best rollout is better by one reward, or by both: after group_norm the sums are the same.
    one, both = [[1.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]]
    assert group_norm(mix(weighted_sum, one, [1.0, 1.0])).tolist() == pytest.approx(
        group_norm(mix(weighted_sum, both, [1.0, 1.0])).tolist(), abs=1e-3
    )
    gains = [group_mean(mix(normalised_sum, parts, [1.0, 1.0])).tolist()[0] for parts in (one, both)]
    assert gains[1] == pytest.approx(2 * gains[0])


def test_normalised_sum_without_eps_adds_0_for_a_reward_without_spread():
    assert mix(normalised_sum, [[1.0, 0.5], [0.0, 0.5]], [1.0, 1.0], eps=0.0) == pytest.approx([2**-0.5, -(2**-0.5)])


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_settings_out_of_their_domain_are_named(value):
    with pytest.raises(ConfigError, match="setting tolerance"):
        mix(lexicographic, [[1.0]], [1.0], tolerance=value)
    with pytest.raises(ConfigError, match="setting eps"):
        mix(normalised_sum, [[1.0]], [1.0], eps=value)


@pytest.mark.parametrize("function", ALL)
def test_the_caller_hands_over_judged_rollouts_only(function):
    parts = [{"right": 1.0, "short": 0.5, "logged": 9.0}, None, {"right": 0.0, "short": 1.0}]
    weights = {"right": 1.0, "short": 2.0}
    expected = mix(function, [[1.0, 0.5], [0.0, 1.0]], [1.0, 2.0])
    assert mixed_rewards(function, parts, weights) == [expected[0], None, expected[1]]
    assert mixed_rewards(function, [None, None], weights) == [None, None]
    assert mixed_rewards(function, [], {}) == []


def test_the_caller_takes_the_order_and_counts_what_could_not_be_judged_as_zero():
    parts = [{"right": None, "short": 1.0}, {"right": 1.0, "short": 0.0}]
    weights = {"right": 1.0, "short": 1.0}
    assert mixed_rewards(lexicographic, parts, weights) == [0.0, 1.0]
    assert mixed_rewards(lexicographic, parts, dict(reversed(weights.items()))) == [1.0, 0.0]

    def late(parts, weights, step):
        return parts[:, 0] * step

    assert mixed_rewards(late, parts, weights, step=3) == [0.0, 3.0]


def test_the_caller_names_who_is_at_fault():
    def reduced(parts):
        return parts.sum()

    def infinite(parts):
        return parts[:, 0] / 0

    def raising(parts):
        return parts["right"]

    parts, weights = [{"right": 1.0}, None], {"right": 1.0}
    with pytest.raises(TrainingError, match=r"reward mixer reduced got 1 rewards and returned shape \(\)"):
        mixed_rewards(reduced, parts, weights)
    with pytest.raises(TrainingError, match="reward mixer infinite"):
        mixed_rewards(infinite, parts, weights)
    with pytest.raises(TrainingError, match="reward mixer raising raised"):
        mixed_rewards(raising, parts, weights)
    with pytest.raises(TrainingError, match="reward mixer weighted_sum has no rewards to mix"):
        mixed_rewards(weighted_sum, parts, {})


@pytest.mark.parametrize("function", ALL)
def test_what_is_named_is_in_the_vocabulary_and_settings_say_what_they_are(function):
    signature = check_signature(function, "mixers", function.__name__)
    assert all(setting.doc and setting.default is not REQUIRED for setting in signature.settings)
    assert signature.requests == ("parts", "weights")
