"""The soft penalty for overlong replies, against DAPO's piecewise formula."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from rollouts.config.settings import REQUIRED
from rollouts.errors import ConfigError, TrainingError
from rollouts.plugins.signature import check_signature
from rollouts.training.algorithms.calls import shaped_rewards
from rollouts.training.algorithms.rewards import overlong


def dapo(length, longest, cache):
    """Yu et al. 2025, eq. 13, as it is printed there."""
    if length <= longest - cache:
        return 0.0
    assert length <= longest
    return ((longest - cache) - length) / cache


def shape(rewards, lengths, max_tokens, **settings):
    return overlong(torch.tensor(rewards, dtype=torch.float64), torch.tensor(lengths), max_tokens, **settings).tolist()


@pytest.mark.parametrize(("buffer", "cache"), [(None, 25), (40, 40), (1, 1), (100, 100)])
def test_overlong_is_dapos_piecewise_formula(buffer, cache):
    lengths = list(range(101))
    found = shape([1.0] * 101, lengths, 100, buffer=buffer)
    assert found == pytest.approx([1.0 + dapo(length, 100, cache) for length in lengths])
    assert found[100 - cache] == 1.0 and found[100] == 0.0 and (cache == 1 or 0 < found[99] < 1)
    wrong = [1.0 + dapo(length, 100, cache + 1) for length in lengths] if cache < 100 else [1.0] * 101  # control
    assert found != pytest.approx(wrong)


def test_the_factor_is_the_penalty_at_the_limit():
    assert shape([0.5, 0.5], [16, 14], 16, factor=3.0) == [-2.5, -1.0]
    assert shape([0.5], [16], 16, factor=0.0) == [0.5]
    assert shape([1.0], [3], 3) == [0.0], "a quarter of 3 tokens is at least one"


def test_settings_out_of_their_domain_are_named():
    for buffer in (0, -5, 101):
        with pytest.raises(ConfigError, match=r"setting buffer is .*from 1 to max_tokens \(100\)"):
            shape([1.0], [1], 100, buffer=buffer)
    for factor in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="setting factor"):
            shape([1.0], [1], 100, factor=factor)
    with pytest.raises(ConfigError, match="--max-tokens"):
        shape([1.0], [1], None)


def test_the_caller_shapes_judged_rollouts_truncated_ones_included():
    found = shaped_rewards(
        overlong, [1.0, None, 0.0], lengths=[8, 8, 6], truncated=[True, False, False], max_tokens=8, step=0
    )
    assert found == [0.0, None, 0.0]
    nothing = shaped_rewards(overlong, [None], lengths=[8], truncated=[True], max_tokens=8, step=0)
    assert nothing == [None]

    def hard(rewards, truncated, step, *, penalty):
        return rewards - truncated * penalty * step

    bound = functools.partial(hard, penalty=0.5)
    found = shaped_rewards(
        bound, [1.0, None, 0.0], lengths=[1] * 3, truncated=[True, True, False], max_tokens=None, step=2
    )
    assert found == [0.0, None, 0.0]


def test_the_caller_names_who_is_at_fault():
    def short(rewards):
        return rewards[1:]

    def nan(rewards):
        return rewards * math.nan

    given = {"lengths": [1, 1], "truncated": [False, False], "max_tokens": 8, "step": 0}
    with pytest.raises(TrainingError, match=r"reward shaping short got 2 rewards and returned shape \(1,\)"):
        shaped_rewards(short, [1.0, 0.0], **given)
    with pytest.raises(TrainingError, match="reward shaping nan"):
        shaped_rewards(functools.partial(nan), [1.0, 0.0], **given)


@pytest.mark.parametrize("function", [overlong])
def test_what_is_named_is_in_the_vocabulary_and_settings_say_what_they_are(function):
    signature = check_signature(function, "shapings", function.__name__)
    assert all(setting.doc and setting.default is not REQUIRED for setting in signature.settings)
