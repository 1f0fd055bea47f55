"""Numerics 13: zero variance, groups of one, rewards that could not be judged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollouts.errors import TrainingError
from rollouts.training.algorithms.advantages import group_advantages, group_mean, group_norm


def test_group_norm_is_the_formula_with_ddof_1():
    rewards = [1.0, 0.0, 0.5, 0.25]
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4)
    np.testing.assert_allclose(group_norm(rewards).numpy(), expected)
    wrong = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-4)
    assert not np.allclose(group_norm(rewards).numpy(), wrong)
    np.testing.assert_allclose(group_mean(torch.tensor(rewards)).numpy(), np.array(rewards) - 0.4375)


@pytest.mark.parametrize("function", [group_norm, group_mean])
def test_no_variance_gives_zero(function):
    assert function([0.1 + 0.2, 0.3, 0.3]).tolist() == [0.0, 0.0, 0.0]  # a deviation of 3e-17, not of 0
    assert function([5.0]).tolist() == [0.0]
    assert function([None, 3.0, None]).tolist() == [0.0, 0.0, 0.0]
    assert function([]).tolist() == []
    assert any(function([0.0, 1e-3]).tolist())  # control


@pytest.mark.parametrize("function", [group_norm, group_mean])
def test_none_is_left_out_and_is_not_zero(function):
    with_none = function([1.0, None, 0.5]).tolist()
    assert with_none[1] == 0.0
    assert [with_none[0], with_none[2]] == pytest.approx(function([1.0, 0.5]).tolist())
    assert with_none != pytest.approx(function([1.0, 0.0, 0.5]).tolist())
    assert group_advantages(function, [1.0, None, 0.5]) == pytest.approx(with_none)


def test_engine_leaves_none_out_for_any_function():
    def naive(rewards):
        return rewards - rewards.mean()

    assert group_advantages(naive, [1.0, None, 0.0]) == [0.5, 0.0, -0.5]
    assert group_advantages(naive, [None, None]) == [0.0, 0.0]

    def per_token(rewards, lengths):
        return rewards / lengths

    assert group_advantages(per_token, [4.0, None, 3.0], lengths=[2, 9, 3]) == [2.0, 0.0, 1.0]


def test_wrong_results_are_named():
    def reduced(rewards):
        return rewards.mean()

    def infinite(rewards):
        return rewards / 0

    with pytest.raises(TrainingError, match=r"advantage reduced got 2 rewards and returned shape \(\)"):
        group_advantages(reduced, [1.0, 2.0])
    with pytest.raises(TrainingError, match="infinite"):
        group_advantages(infinite, [1.0, 2.0])
