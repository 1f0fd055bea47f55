"""Numerics 13 and 14: zero variance, groups of one, rewards that could not be judged, truncated samples."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.config.settings import REQUIRED
from rollouts.errors import ConfigError, TrainingError
from rollouts.plugins.signature import check_signature
from rollouts.training.algorithms.advantages import baseline, group_mean, group_norm, ones, rloo
from rollouts.training.algorithms.calls import group_advantages
from rollouts.training.algorithms.selection import top

GROUPS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=9)
COMPARING = [group_norm, group_mean, rloo]


def test_group_norm_is_the_formula_with_ddof_1():
    rewards = [1.0, 0.0, 0.5, 0.25]
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4)
    np.testing.assert_allclose(group_norm(rewards).numpy(), expected)
    wrong = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-4)
    assert not np.allclose(group_norm(rewards).numpy(), wrong)
    np.testing.assert_allclose(group_mean(torch.tensor(rewards)).numpy(), np.array(rewards) - 0.4375)


@pytest.mark.parametrize("function", COMPARING)
def test_no_variance_gives_zero(function):
    assert function([0.1 + 0.2, 0.3, 0.3]).tolist() == [0.0, 0.0, 0.0]  # a deviation of 3e-17, not of 0
    assert function([5.0]).tolist() == [0.0]
    assert function([None, 3.0, None]).tolist() == [0.0, 0.0, 0.0]
    assert function([0.1 + 0.2] * 8).tolist() == [0.0] * 8
    assert function([]).tolist() == []
    assert any(function([0.0, 1e-3]).tolist())  # control


@pytest.mark.parametrize("function", COMPARING)
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


def test_rloo_compares_with_the_mean_of_the_others():
    third = 1 / 3
    assert rloo([1.0, 0.0, 0.0, 0.0]).tolist() == pytest.approx([1.0, -third, -third, -third], abs=1e-15)
    rewards = [0.3, 2.0, -1.0, 0.5, 0.5]
    expected = [reward - (sum(rewards) - reward) / 4 for reward in rewards]
    assert rloo(rewards).tolist() == pytest.approx(expected)
    assert group_mean(rewards).tolist() != pytest.approx(expected)  # control: not G / (G - 1)
    assert rloo([1.0, None, 0.0, 0.0]).tolist() == pytest.approx([1.0, 0.0, -0.5, -0.5]), "three were judged, not four"


def test_baseline_and_ones_act_on_any_group():
    assert baseline([1.0, None, 0.25], value=0.5).tolist() == [0.5, 0.0, -0.25]
    assert baseline([3.0]).tolist() == [3.0] and rloo([3.0]).tolist() == [0.0]
    assert baseline([0.3] * 3).tolist() == [0.3] * 3
    assert ones([0.0, None, 7.0]).tolist() == [1.0, 0.0, 1.0] and ones([5.0]).tolist() == [1.0]
    assert ones(torch.tensor([1, 2])).dtype == torch.float64 and ones(torch.zeros(2)).dtype == torch.float32


@given(GROUPS, st.floats(-50, 50))
def test_comparisons_sum_to_zero_and_do_not_see_a_shift(rewards, shift):
    for function in COMPARING:
        values = function(rewards)
        assert float(values.sum()) == pytest.approx(0.0, abs=1e-6)
        if function is not group_norm or max(rewards) - min(rewards) > 1e-4:  # else the shift may round the spread away
            shifted = function([reward + shift for reward in rewards])
            assert shifted.tolist() == pytest.approx(values.tolist(), abs=1e-4)
    fixed = baseline(rewards)  # control
    assert baseline([reward + 1.0 for reward in rewards]).tolist() != pytest.approx(fixed.tolist(), abs=1e-3)


def test_group_norm_does_not_see_the_scale_and_the_others_do():
    rewards = [0.0, 1.0, 5.0]
    tenfold = [10 * reward for reward in rewards]
    assert group_norm(tenfold).tolist() == pytest.approx(group_norm(rewards).tolist(), abs=1e-3)
    assert rloo(tenfold).tolist() == pytest.approx([10 * value for value in rloo(rewards).tolist()])


@pytest.mark.parametrize("function", COMPARING)
def test_a_truncated_sample_stays_in_the_statistics(function):
    """The caller masks its tokens; nobody else's advantage may depend on that."""
    rewards = [1.0, 0.0, 0.0, 0.5]
    assert group_advantages(function, rewards) == pytest.approx(function(rewards).tolist())
    dropped = group_advantages(function, [1.0, 0.0, None, 0.5])  # control: what leaving it out would have done
    assert dropped[0] != pytest.approx(function(rewards).tolist()[0])


def test_an_eps_of_0_divides_nothing_by_0():
    for rewards in ([1.0] * 4, [0.1 + 0.2] * 8, [2.0, None], [None, None]):
        assert group_advantages(functools.partial(group_norm, eps=0.0), rewards) == [0.0] * len(rewards)
    assert group_norm([1.0, 0.0], eps=0.0).tolist() == pytest.approx([2**-0.5, -(2**-0.5)])


def test_settings_out_of_their_domain_are_named():
    for eps in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="setting eps"):
            group_norm([1.0, 0.0], eps=eps)
    with pytest.raises(ConfigError, match="setting value"):
        baseline([1.0], value=float("nan"))
    with pytest.raises(ConfigError, match="setting eps"):  # and not taken for a fault of the author's
        group_advantages(lambda rewards: group_norm(rewards, eps=-1.0), [1.0, 0.0])


def test_what_is_no_result_is_named():
    def raising(rewards):
        raise KeyError("b")

    def nothing(rewards):
        print(rewards.mean())

    with pytest.raises(TrainingError, match=r"advantage raising raised KeyError: 'b' \(.*test_advantages.py, line"):
        group_advantages(raising, [1.0, 2.0])
    with pytest.raises(TrainingError, match="advantage nothing got 2 rewards and returned NoneType None"):
        group_advantages(nothing, [1.0, 2.0])
    with pytest.raises(TrainingError, match="advantage <lambda> got 2"):
        group_advantages(lambda rewards: [1.0], [1.0, 2.0])
    assert group_advantages(top, [1.0, 2.0]) == [0.0, 1.0], "bools are numbers"


@pytest.mark.parametrize("function", [group_norm, group_mean, rloo, baseline, ones])
def test_what_is_named_is_in_the_vocabulary_and_settings_say_what_they_are(function):
    signature = check_signature(function, "advantages", function.__name__)
    assert all(setting.doc and setting.default is not REQUIRED for setting in signature.settings)
    assert signature.requests == ("rewards",)
