"""Pairings: which rollouts of a group are compared."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.config.settings import REQUIRED
from rollouts.errors import ConfigError, TrainingError
from rollouts.plugins.signature import check_signature
from rollouts.training.algorithms.calls import paired
from rollouts.training.algorithms.selection import all_pairs, best_worst

GIVEN = {"lengths": [1, 2, 3, 4], "step": 0}


def pair(function, rewards, **settings):
    return function(torch.tensor(rewards, dtype=torch.float64), **settings)


def test_best_worst_is_one_pair_where_there_is_a_difference():
    assert pair(best_worst, [0.5, 0.0, 1.0, 1.0, 0.0]) == [(2, 1)]
    assert pair(best_worst, [0.1 + 0.2, 0.3, 0.3]) == [], "a spread of rounding is none"
    assert pair(best_worst, [0.3, 0.3 + 1e-3]) == [(1, 0)]  # control
    assert pair(best_worst, [1.0]) == pair(best_worst, []) == []


def test_all_pairs_by_difference_then_by_position():
    assert pair(all_pairs, [0.0, 1.0, 0.5]) == [(1, 0), (1, 2), (2, 0)]
    assert pair(all_pairs, [0.0, 1.0, 0.5], limit=2) == [(1, 0), (1, 2)]
    assert pair(all_pairs, [0.0, 1.0, 0.5], margin=0.6) == [(1, 0)]
    assert pair(all_pairs, [0.3, 0.1 + 0.2]) == pair(all_pairs, [1.0]) == pair(all_pairs, []) == []
    assert pair(all_pairs, [0.3, 0.1], margin=0.2) == [(0, 1)], "0.3 - 0.1 is 0.2, whatever floats say"
    assert 0.3 - 0.1 < 0.2
    assert (
        len(pair(all_pairs, [1.0] * 4 + [0.0] * 4)) == 8 < len(pair(all_pairs, [1.0] * 4 + [0.0] * 4, limit=99)) == 16
    )


@given(st.lists(st.floats(-3, 3), max_size=7), st.floats(0, 2), st.integers(1, 9))
def test_every_pair_is_better_against_worse(rewards, margin, limit):
    pairs = pair(all_pairs, rewards, margin=margin, limit=limit)
    differences = [rewards[chosen] - rewards[rejected] for chosen, rejected in pairs]
    assert all(difference > 0 and difference >= margin - 2e-6 for difference in differences)
    assert len(set(pairs)) == len(pairs) <= limit
    if pairs:
        (best,) = pair(best_worst, rewards)
        assert rewards[best[0]] - rewards[best[1]] == pytest.approx(differences[0], abs=2e-6)


def test_settings_out_of_their_domain_are_named():
    for margin in (-0.1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="setting margin"):
            pair(all_pairs, [1.0, 0.0], margin=margin)
    with pytest.raises(ConfigError, match="setting limit is 0"):
        pair(all_pairs, [1.0, 0.0], limit=0)


def test_the_caller_speaks_of_positions_in_the_whole_group():
    rewards, eligible = [9.0, None, 0.0, 1.0], [False, False, True, True]
    assert paired(best_worst, rewards, eligible, **GIVEN) == [(3, 2)]
    assert paired(best_worst, rewards, [True, False, True, True], **GIVEN) == [(0, 2)]  # control
    assert paired(best_worst, rewards, [False] * 4, **GIVEN) == []

    def by_length(rewards, lengths, step):
        assert lengths.tolist() == [3, 4] and step == 0
        return torch.tensor([[1, 0]])

    assert paired(by_length, rewards, eligible, **GIVEN) == [(3, 2)]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([(0, 2)], r"the pair \(0, 2\)"),
        ([(-1, 0)], r"the pair \(-1, 0\)"),
        ([(1, 1)], r"the pair \(1, 1\)"),
        ([(1.0, 0.0)], r"list \[\(1.0, 0.0\)\]"),
        ([(0, 1, 0)], "list"),
        ((0, 1), r"tuple \(0, 1\)"),
        (None, "NoneType None"),
    ],
)
def test_what_is_no_pair_is_named(returned, words):
    def mine(rewards):
        return returned

    with pytest.raises(TrainingError, match=f"pair selector mine got 2 rewards and returned {words}.* from 0 to 1"):
        paired(mine, [1.0, 0.0], [True, True], **GIVEN)
    assert paired(lambda rewards: [(1, 0)], [1.0, 0.0], [True, True], **GIVEN) == [(1, 0)]


def test_what_raises_is_named():
    def raising(rewards):
        return rewards[5]

    with pytest.raises(TrainingError, match="pair selector raising raised IndexError"):
        paired(raising, [1.0, 0.0], [True, True], **GIVEN)


@pytest.mark.parametrize("function", [best_worst, all_pairs])
def test_what_is_named_is_in_the_vocabulary_and_settings_say_what_they_are(function):
    signature = check_signature(function, "pairings", function.__name__)
    assert all(setting.doc and setting.default is not REQUIRED for setting in signature.settings)
    assert signature.requests == ("rewards",)
