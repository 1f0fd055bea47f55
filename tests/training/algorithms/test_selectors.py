"""Selectors: which rollouts of a group are trained."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.config.settings import REQUIRED
from rollouts.errors import ConfigError, TrainingError
from rollouts.plugins.signature import check_signature
from rollouts.training.algorithms.calls import selected
from rollouts.training.algorithms.selection import max_variance, reward_at_least, top


def select(function, rewards, **settings):
    found = function(torch.tensor(rewards, dtype=torch.float64), **settings)
    assert found.dtype == torch.bool and found.shape == (len(rewards),)
    return found.tolist()


def test_reward_at_least_is_inclusive_and_forgives_rounding():
    assert select(reward_at_least, [1.0, 0.99, 2.0, 0.7 + 0.2 + 0.1]) == [True, False, True, True]
    assert 0.7 + 0.2 + 0.1 < 1.0
    assert select(reward_at_least, [0.0, -1.0], threshold=-0.5) == [True, False]


def test_top_takes_the_best_and_of_equal_ones_the_first():
    assert select(top, [0.0, 2.0, 1.0]) == [False, True, False]
    assert select(top, [1.0, 1.0, 1.0], count=2) == [True, True, False]
    assert select(top, [0.0, 2.0, 1.0], count=2) == [False, True, True]
    assert select(top, [0.0], count=5) == [True]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.integers(2, 6))
def test_max_variance_is_the_largest_of_all_subsets(rewards, count):
    kept = select(max_variance, rewards, count=count)
    assert sum(kept) == min(count, len(rewards))
    if len(rewards) <= count:
        return
    chosen = np.var([reward for reward, keep in zip(rewards, kept, strict=True) if keep])
    largest = max(np.var(subset) for subset in itertools.combinations(rewards, count))
    assert chosen == pytest.approx(largest, abs=1e-9)


def test_max_variance_takes_both_ends():
    assert select(max_variance, [0.0, 0.4, 0.5, 0.6, 1.0], count=2) == [True, False, False, False, True]
    kept = select(max_variance, [1.0, 0.0] * 4, count=4)
    assert sum(kept[::2]) == sum(kept[1::2]) == 2, "half good, half bad"
    assert select(max_variance, [0.3] * 6, count=4) == [True, True, False, False, True, True], "half and half"
    best = select(top, [0.0, 0.4, 0.5, 0.6, 1.0], count=2)  # control: the best two have less
    assert best == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (reward_at_least, "threshold", math.nan),
        (reward_at_least, "threshold", math.inf),
        (top, "count", 0),
        (max_variance, "count", 1),
    ],
)
def test_settings_out_of_their_domain_are_named(function, name, value):
    with pytest.raises(ConfigError, match=f"the setting {name} is {value}"):
        select(function, [1.0, 0.0], **{name: value})


def test_the_caller_hands_over_eligible_rollouts_only():
    rewards, eligible = [5.0, None, 1.0, 2.0], [False, False, True, True]
    given = {"lengths": [1, 2, 3, 4], "step": 0}
    assert selected(top, rewards, eligible, **given) == [False, False, False, True]
    assert selected(top, rewards, [True, False, True, True], **given) == [True, False, False, False]  # control
    assert selected(top, rewards, [False] * 4, **given) == [False] * 4

    def shortest(rewards, lengths, step):
        assert step == 7 and rewards.dtype == torch.float64
        return lengths == lengths.min()

    assert selected(shortest, rewards, eligible, lengths=[1, 2, 3, 4], step=7) == [False, False, True, False]
    assert selected(lambda rewards: [True, False], rewards, eligible, **given) == [False, False, True, False]
    with pytest.raises(AssertionError, match="rollout 1 may be trained on, but was not judged"):
        selected(top, rewards, [True] * 4, **given)


def test_the_caller_names_who_is_at_fault():
    def positions(rewards):
        return rewards.argsort()

    def short(rewards):
        return rewards[1:] > 0

    def raising(rewards, *, level):
        return rewards > level["x"]

    given = {"lengths": [1, 1], "step": 0}
    with pytest.raises(TrainingError, match=r"rollout selector positions got 2 rewards .* 2 bools, one per rollout"):
        selected(positions, [1.0, 0.0], [True, True], **given)
    with pytest.raises(TrainingError, match=r"rollout selector short got 2 rewards and returned shape \(1,\)"):
        selected(short, [1.0, 0.0], [True, True], **given)
    with pytest.raises(TrainingError, match="rollout selector raising raised TypeError"):
        selected(functools.partial(raising, level=0.5), [1.0, 0.0], [True, True], **given)


@pytest.mark.parametrize("function", [reward_at_least, top, max_variance])
def test_what_is_named_is_in_the_vocabulary_and_settings_say_what_they_are(function):
    signature = check_signature(function, "selectors", function.__name__)
    assert all(setting.doc and setting.default is not REQUIRED for setting in signature.settings)
    assert signature.requests == ("rewards",)
