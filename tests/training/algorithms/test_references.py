"""The rules that update the reference policy in place."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.config.settings import REQUIRED
from rollouts.errors import ConfigError
from rollouts.plugins.signature import call_with, check_signature
from rollouts.training.algorithms.kl import adapter_off, ema, every_n, frozen


def follow(rule, policies, *, dtype=torch.float64, adapters=False):
    """The reference after each version; `policies` are the policy's two tensors at versions 0, 1, ..."""
    reference = [torch.tensor(value, dtype=dtype) for value in policies[0]]
    own = list(reference)
    seen = []
    for version, values in enumerate(policies):
        policy = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]
        available = {"reference": reference, "policy": policy, "version": version}
        if adapters:
            available["adapters"] = reference
        assert call_with(rule, available) is None
        assert [tensor.tolist() for tensor in policy] == [list(value) for value in values], "the policy is only read"
        assert not any(tensor.requires_grad for tensor in reference)
        seen.append([value for tensor in reference for value in tensor.tolist()])
    assert all(tensor is before for tensor, before in zip(reference, own, strict=True)), "in place"
    return seen


def moving(steps):
    return [([float(step), step**2], [-1.0 * step]) for step in range(steps + 1)]


def flat(policies):
    return [[*map(float, first), *map(float, second)] for first, second in policies]


def test_frozen_never_moves():
    assert follow(frozen, moving(4)) == [[0.0, 0.0, 0.0]] * 5
    assert follow(every_n, moving(4)) == [[0.0, 0.0, 0.0]] * 5, "100 steps are not over"
    assert follow(functools.partial(every_n, steps=1), moving(4)) != [[0.0, 0.0, 0.0]] * 5  # control


def test_adapter_off_is_the_base_model_from_the_first_version_on():
    policies = [([1.0, 2.0], [3.0]), ([4.0, 5.0], [6.0])]
    assert follow(adapter_off, policies, adapters=True) == [[0.0] * 3] * 2
    assert follow(frozen, policies, adapters=True) == [[1.0, 2.0, 3.0]] * 2  # control: what it began with
    adapter_off([])


def test_every_n_copies_at_its_versions_and_at_no_other():
    policies = moving(7)
    assert follow(functools.partial(every_n, steps=3), policies) == [flat(policies)[v // 3 * 3] for v in range(8)]
    assert follow(functools.partial(every_n, steps=1), policies) == flat(policies)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.floats(0, 1))
def test_ema_is_its_closed_form_after_k_steps(values, decay):
    policies = [([value, 2 * value], [-value]) for value in values]
    found = follow(functools.partial(ema, decay=decay), policies)[-1]
    k = len(values) - 1
    expected = decay**k * values[0] + (1 - decay) * sum(decay ** (k - i) * values[i] for i in range(1, k + 1))
    assert found == pytest.approx([expected, 2 * expected, -expected], abs=1e-9)


def test_ema_by_default_and_at_its_ends():
    policies = [([0.0], [0.0]), ([1.0], [1.0]), ([1.0], [1.0])]
    assert follow(ema, policies)[-1] == pytest.approx([1 - 0.99**2] * 2)
    assert follow(functools.partial(ema, decay=0.9), policies)[-1] != pytest.approx([1 - 0.99**2] * 2)  # control
    assert follow(functools.partial(ema, decay=1.0), policies)[-1] == [0.0, 0.0]
    assert follow(functools.partial(ema, decay=0.0), policies)[-1] == [1.0, 1.0]


@pytest.mark.parametrize("rule", [ema, functools.partial(every_n, steps=1)])
def test_a_reference_of_another_precision(rule):
    policies = [([0.0, 0.0], [0.0]), ([1.0, 1.0], [1.0])]
    expected = 1.0 if rule is not ema else 0.01
    assert follow(rule, policies, dtype=torch.float32)[-1] == pytest.approx([expected] * 3)


@pytest.mark.parametrize("decay", [-0.1, 1.5, float("nan")])
def test_settings_out_of_their_domain_are_named(decay):
    with pytest.raises(ConfigError, match="setting decay"):
        ema([], [], 0, decay=decay)
    with pytest.raises(ConfigError, match="setting steps"):
        every_n([], [], 0, steps=0)


@pytest.mark.parametrize("function", [frozen, adapter_off, every_n, ema])
def test_what_is_named_is_in_the_vocabulary_and_settings_say_what_they_are(function):
    signature = check_signature(function, "references", function.__name__)
    assert all(setting.doc and setting.default is not REQUIRED for setting in signature.settings)
