"""Numerics 7 and 9: every shipped loss against an independent numpy formula, gradcheck, boundaries, and TRL."""

from __future__ import annotations

import functools
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rollouts.training.algorithms import losses
from rollouts.training.algorithms.aggregation import Masks, aggregate


def tensors(count: int = 40, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(count, generator=generator, dtype=torch.float64)
    old = logprobs + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64)
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    return logprobs, old, advantages


def numpy_ppo(logprobs, old, advantages, low, high):
    result = []
    for new, before, advantage in zip(logprobs, old, advantages, strict=True):
        ratio = np.exp(new - before)
        result.append(-min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage))
    return np.array(result)


FORMULAS = {
    "ppo_clip": (lambda p, o, a: losses.ppo_clip(p, o, a), lambda p, o, a: numpy_ppo(p, o, a, 0.2, 0.2)),
    "ppo_clip_higher": (
        lambda p, o, a: losses.ppo_clip(p, o, a, clip_low=0.1, clip_high=0.28),
        lambda p, o, a: numpy_ppo(p, o, a, 0.1, 0.28),
    ),
    "reinforce": (lambda p, o, a: losses.reinforce(p, a), lambda p, o, a: -a * p),
    "importance": (lambda p, o, a: losses.importance(p, o, a), lambda p, o, a: -np.exp(p) / np.exp(o) * a),
    "cross_entropy": (lambda p, o, a: losses.cross_entropy(p), lambda p, o, a: -p),
    "entropy_bonus": (lambda p, o, a: losses.entropy_bonus(p), lambda p, o, a: -p),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_equals_numpy_and_gradcheck(name):
    ours, reference = FORMULAS[name]
    logprobs, old, advantages = tensors()
    values = ours(logprobs, old, advantages)
    assert values.shape == logprobs.shape
    np.testing.assert_allclose(values.numpy(), reference(logprobs.numpy(), old.numpy(), advantages.numpy()), rtol=1e-12)
    assert torch.autograd.gradcheck(lambda p: ours(p, old, advantages), (logprobs.clone().requires_grad_(),))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0])
def test_clip_boundaries_and_signs(ratio, advantage):
    new = torch.tensor([float(np.log(ratio))], dtype=torch.float64, requires_grad=True)
    losses.ppo_clip(
        new, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    ).sum().backward()
    clipped = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
    assert new.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


@pytest.mark.parametrize("loss", [losses.ppo_clip, losses.importance])
def test_first_step_is_reinforce(loss):
    logprobs, _, advantages = tensors()
    gradients = []
    for function in (lambda p: loss(p, logprobs, advantages), lambda p: losses.reinforce(p, advantages)):
        variable = logprobs.clone().requires_grad_()
        function(variable).sum().backward()
        gradients.append(variable.grad)
    torch.testing.assert_close(*gradients)
    # Control: with another anchor it is not.
    variable = logprobs.clone().requires_grad_()
    loss(variable, logprobs + 0.1, advantages).sum().backward()
    assert not torch.allclose(variable.grad, gradients[1])


AGGREGATION_OF_TRL = {"dapo": "token_mean", "bnpo": "token_mean", "grpo": "rollout_mean", "dr_grpo": "dr_grpo"}


def trl_loss(loss_type: str, logprobs, old, advantages, mask, longest: int):
    """TRL's own `_compute_loss`, with the model's forward pass replaced by the given logprobs [B, C]."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    class Stub(SimpleNamespace):
        def __getattr__(self, name):  # anything else the trainer asks for is a switch that is off
            if name.startswith("__"):
                raise AttributeError(name)
            return False

    trainer = Stub(
        loss_type=loss_type,
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        max_completion_length=longest,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, torch.zeros_like(logprobs), None),
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(mask.shape[0], 2, dtype=torch.long),
        "prompt_mask": torch.ones(mask.shape[0], 2, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize("loss_type", AGGREGATION_OF_TRL)
def test_grpo_equals_trl(loss_type):
    pytest.importorskip("trl")
    generator = torch.Generator().manual_seed(1)
    rows, columns, longest = 6, 9, 16
    logprobs = -3 * torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    old = logprobs + 0.4 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    lengths = [9, 4, 7, 1, 5, 8]
    mask = torch.tensor([[1.0] * length + [0.0] * (columns - length) for length in lengths], dtype=torch.float64)

    theirs = logprobs.clone().requires_grad_()
    expected = trl_loss(loss_type, theirs, old, advantages, mask, longest)
    expected.backward()

    weights, denominator = aggregate(
        AGGREGATION_OF_TRL[loss_type], Masks(mask.tolist(), list(range(rows)), [0, 0, 0, 1, 1, 1], longest)
    )
    ours = logprobs.clone().requires_grad_()
    spread = advantages[:, None].expand(rows, columns).reshape(-1)
    values = losses.ppo_clip(ours.reshape(-1), old.reshape(-1), spread)
    found = (values * torch.tensor(weights, dtype=torch.float64).reshape(-1)).sum() / denominator
    found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    # Control: another aggregation gives another loss.
    other = aggregate("sum", Masks(mask.tolist(), list(range(rows)), [0] * rows, longest)).weights
    wrong = (values * torch.tensor(other, dtype=torch.float64).reshape(-1)).sum()
    assert not torch.allclose(wrong, expected)


def test_settings_are_keyword_only():
    bound = functools.partial(losses.ppo_clip, clip_high=0.28)
    logprobs, old, advantages = tensors()
    torch.testing.assert_close(
        bound(logprobs, old, advantages), losses.ppo_clip(logprobs, old, advantages, clip_high=0.28)
    )
    with pytest.raises(TypeError):
        losses.ppo_clip(logprobs, old, advantages, 0.1)
