"""Off-policy corrections: exact weights, the cap, 0 outside the bounds, whole rollouts, and masked positions."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from rollouts.errors import ConfigError
from rollouts.plugins.signature import check_signature
from rollouts.training.algorithms import corrections
from rollouts.training.algorithms.algorithm import Algorithm, Term
from rollouts.training.algorithms.corrections import importance_weights
from rollouts.training.algorithms.losses import importance, reinforce
from rollouts.training.algorithms.objective import evaluate_objective

partial = functools.partial
ALL = (corrections.truncated, corrections.icepop, corrections.sequence_mask)


def streams(ratios, mask=None, rollouts=None):
    """Tokens whose pi_old / mu is given."""
    count = len(ratios)
    sampler = -torch.linspace(0.1, 3.0, count, dtype=torch.float64)
    return {
        "old_logprobs": sampler + torch.tensor(ratios, dtype=torch.float64).log(),
        "rollout_logprobs": sampler,
        "mask": torch.tensor(mask or [1.0] * count, dtype=torch.float64),
        "rollout_index": torch.tensor(rollouts or [0] * count),
    }


def call(function, given, **settings):
    names = check_signature(getattr(function, "func", function), "corrections", "correction").requests
    return function(*(given[name] for name in names), **settings)


def assert_weights(function, given, wanted):
    torch.testing.assert_close(call(function, given), torch.tensor(wanted, dtype=torch.float64))


def test_truncated_caps_the_ratio():
    given = streams([0.01, 0.5, 1.0, 1.999, 2.001, 50.0])
    assert_weights(corrections.truncated, given, [0.01, 0.5, 1.0, 1.999, 2.0, 2.0])
    assert_weights(partial(corrections.truncated, cap=0.7), given, [0.01, 0.5, 0.7, 0.7, 0.7, 0.7])
    swapped = {**given, "old_logprobs": given["rollout_logprobs"], "rollout_logprobs": given["old_logprobs"]}
    for wrong in ((corrections.icepop, given), (corrections.truncated, swapped)):
        with pytest.raises(AssertionError):
            assert_weights(*wrong, [0.01, 0.5, 1.0, 1.999, 2.0, 2.0])


def test_icepop_leaves_out_what_lies_outside():
    given = streams([0.01, 0.499, 0.501, 1.0, 4.99, 5.01, 1e6])
    assert_weights(corrections.icepop, given, [0.0, 0.0, 0.501, 1.0, 4.99, 0.0, 0.0])
    assert_weights(partial(corrections.icepop, low=0.0, high=2.0), given, [0.01, 0.499, 0.501, 1.0, 0.0, 0.0, 0.0])
    with pytest.raises(AssertionError):  # control: a cap where a zero belongs
        assert_weights(partial(corrections.truncated, cap=5.0), given, [0.0, 0.0, 0.501, 1.0, 4.99, 0.0, 0.0])


def test_sequence_mask_takes_the_geometric_mean_of_each_rollout():
    """Rollout 4: (2 * .5)^(1/2) = 1. Rollout 2: (1.3 * 1.0)^(1/2) = 1.14. Rollout 9: .85. Its tokens lie scattered."""
    given = streams([2.0, 1.3, 0.85, 0.5, 1.0, 0.85], rollouts=[4, 2, 9, 4, 2, 9])
    wanted = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert_weights(corrections.sequence_mask, given, wanted)
    assert_weights(partial(corrections.sequence_mask, low=0.8, high=1.1), given, [1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    assert_weights(partial(corrections.sequence_mask, low=0.9, high=1.2), given, [1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    merged = {**given, "rollout_index": torch.zeros(6, dtype=torch.int64)}
    for wrong in ((corrections.icepop, given), (corrections.sequence_mask, merged)):
        with pytest.raises(AssertionError):
            assert_weights(*wrong, wanted)


def test_sequence_mask_counts_live_tokens_only():
    """The masked token of rollout 0 is far off; without it the mean is 1. Rollout 1 has nothing live."""
    given = streams([1.0, 1e4, 1.0, 7.0], mask=[1.0, 0.0, 1.0, 0.0], rollouts=[0, 0, 0, 1])
    assert_weights(corrections.sequence_mask, given, [1.0, 1.0, 1.0, 1.0])
    with pytest.raises(AssertionError):
        assert_weights(corrections.sequence_mask, {**given, "mask": torch.ones(4).double()}, [1.0, 1.0, 1.0, 1.0])


def test_sequence_mask_weighs_with_a_float_mask():
    """exp((1 * log 1.3 + 0.1 * 0) / 1.1) = 1.27; with the weights the other way round 1.02."""
    given = streams([1.3, 1.0], mask=[1.0, 0.1])
    assert_weights(corrections.sequence_mask, given, [0.0, 0.0])
    given["mask"] = given["mask"].flip(0)
    assert_weights(corrections.sequence_mask, given, [1.0, 1.0])


@pytest.mark.parametrize("length", [1, 10, 1000])
def test_the_mean_does_not_depend_on_the_length(length):
    """A product would leave every long rollout out: 1.05^1000 is 1e21."""
    assert_weights(corrections.sequence_mask, streams([1.05] * length), [1.0] * length)
    assert_weights(corrections.sequence_mask, streams([1.15] * length), [0.0] * length)


def test_segments_of_one_rollout_share_its_fate():
    """Two rows, one rollout: the first alone would be kept."""
    ratios, segments = [1.0, 1.0, 1.5, 1.5], [0, 0, 1, 1]
    assert_weights(corrections.sequence_mask, streams(ratios), [0.0] * 4)
    assert_weights(corrections.sequence_mask, streams(ratios, rollouts=segments), [1.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_masked_positions_are_never_nan_and_change_nothing(function, value):
    given = streams([1.02, 0.97, 3.0, 1.01], mask=[1.0, 1.0, 0.0, 0.5], rollouts=[0, 0, 0, 1])
    clean, live = call(function, given), given["mask"] > 0
    for both in (True, False):
        names = ("old_logprobs", "rollout_logprobs") if both else ("rollout_logprobs",)
        spoilt = given | {name: given[name].masked_fill(~live, value) for name in names}
        found = call(function, spoilt)
        assert found.isfinite().all()
        assert torch.equal(found[live], clean[live])
    broken = given | {"rollout_logprobs": given["rollout_logprobs"].masked_fill(live, math.nan)}
    assert call(function, broken)[live].isnan().all(), "control: at a live position it is not hidden"


@pytest.mark.parametrize("function", ALL)
def test_equal_engines_weigh_one(function):
    assert_weights(function, streams([1.0] * 5, rollouts=[0, 1, 1, 2, 0]), [1.0] * 5)
    with pytest.raises(AssertionError):
        assert_weights(function, streams([0.3] * 5), [1.0] * 5)


@pytest.mark.parametrize("function", ALL)
def test_far_logprobs_are_clamped(function):
    given = streams([1.0, 1.0])
    given["rollout_logprobs"] = torch.tensor([-1e5, 1e5], dtype=torch.float64)
    assert call(function, given).isfinite().all()


def test_truncated_importance_sampling_is_unbiased_below_the_cap():
    """Sampling 5 actions from mu, weighing with pi_old / mu, gives the policy gradient of pi_old; unweighed not."""
    generator = torch.Generator().manual_seed(0)
    theta, mu, advantages = torch.randn(3, 5, dtype=torch.float64, generator=generator) * 0.2
    sampler, policy = mu.log_softmax(-1), theta.log_softmax(-1)

    def gradient(correction, sampled):
        leaf = theta.clone().requires_grad_()
        logprobs = leaf.log_softmax(-1)
        given = {
            "logprobs": logprobs,
            "old_logprobs": policy,
            "rollout_logprobs": sampled,
            "advantages": advantages,
            "mask": torch.ones(5, dtype=torch.float64),
            "rollout_index": torch.arange(5),
        }
        algorithm = Algorithm(None, "token_mean", (Term(importance),), correction=correction)
        weights = importance_weights(algorithm, given, given["mask"])
        found = evaluate_objective(algorithm, given, given["mask"], weights=weights)
        (sampled.exp() * found.values).sum().backward()
        return leaf.grad

    leaf = theta.clone().requires_grad_()
    (policy.exp() * reinforce(leaf.log_softmax(-1), advantages)).sum().backward()
    torch.testing.assert_close(gradient(corrections.truncated, sampler), leaf.grad)
    torch.testing.assert_close(gradient(partial(corrections.icepop, low=0.1), sampler), leaf.grad)
    for wrong in (None, partial(corrections.truncated, cap=0.5)):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(gradient(wrong, sampler), leaf.grad)


@pytest.mark.parametrize(
    ("function", "setting", "values"),
    [
        (corrections.truncated, "cap", [0.0, -1.0, math.nan]),
        (corrections.icepop, "low", [-0.1, 1.1, math.nan]),
        (corrections.icepop, "high", [0.9, -1.0, math.nan]),
        (corrections.sequence_mask, "low", [-0.1, 1.1]),
        (corrections.sequence_mask, "high", [0.9]),
    ],
)
def test_settings_outside_their_domain_are_refused(function, setting, values):
    for value in values:
        with pytest.raises(ConfigError, match=rf"the setting {setting} is .*; type --correction\.{setting}"):
            call(function, streams([1.0]), **{setting: value})
    call(function, streams([1.0]), **{setting: 1.0})


def test_settings_are_documented():
    for function in ALL:
        signature = check_signature(function, "corrections", function.__name__)
        assert signature.settings and all(setting.doc for setting in signature.settings)
