"""Losses over logits: values and gradients against formulas written out here."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from rollouts.errors import TrainingError
from rollouts.training import (
    RLTrainingConfig,
    RolloutBatch,
    Sample,
    compute_advantages,
    compute_grpo_loss,
    compute_reward,
    convert_to_batch,
    grpo_loss,
    ppo_loss,
    prepare_grpo_batch,
)

LABELS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])
MASK = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]])
ADVANTAGES = torch.tensor([1.5, -0.5])


def logits(seed=0):
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).requires_grad_()


def by_hand(given):
    """-A times the mean logprob of a row's trained tokens, row by row and token by token."""
    total = torch.tensor(0.0)
    for row in range(2):
        scores = F.log_softmax(given[row], -1)
        live = [t for t in range(1, 4) if MASK[row, t] > 0]
        total = total - ADVANTAGES[row] * sum(scores[t - 1, LABELS[row, t]] for t in live) / len(live)
    return total / 2


def test_grpo_loss_is_its_formula():
    ours, theirs = logits(), logits()
    loss, expected = grpo_loss(ours, LABELS, MASK, ADVANTAGES), by_hand(theirs)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert ours.grad[:, -1].abs().sum() == 0  # nothing follows the last position


def test_a_row_without_trained_tokens_does_not_count():
    loss = grpo_loss(logits(), LABELS, MASK * torch.tensor([[1.0], [0.0]]), ADVANTAGES)
    alone = grpo_loss(logits()[:1], LABELS[:1], MASK[:1], ADVANTAGES[:1])
    torch.testing.assert_close(loss, alone)
    assert grpo_loss(logits(), LABELS, MASK * 0, ADVANTAGES).item() == 0.0


def test_ppo_loss_at_ratio_one_has_the_gradient_of_grpo_loss():
    ours, theirs = logits(), logits()
    old = F.log_softmax(logits()[:, :-1], -1).gather(-1, LABELS[:, 1:, None]).squeeze(-1).detach()
    ppo_loss(ours, LABELS, MASK, ADVANTAGES, F.pad(old, (1, 0))).backward()
    grpo_loss(theirs, LABELS, MASK, ADVANTAGES).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(("shift", "expected"), [(-1.0, -1.2 * 1.5), (1.0, -math.exp(-1) * 1.5)])
def test_ppo_loss_clips_the_ratio(shift, expected):
    """A ratio of e with A > 0 is cut to 1.2, and has no gradient; one of 1/e is not cut."""
    given = logits()
    old = F.log_softmax(given[:, :-1], -1).gather(-1, LABELS[:, 1:, None]).squeeze(-1).detach() + shift
    one = slice(0, 1)
    loss = ppo_loss(given[one], LABELS[one], MASK[one], ADVANTAGES[one], F.pad(old, (1, 0))[one], clip_range=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    assert bool(given.grad.abs().sum() == 0) == (shift < 0)


def test_compute_grpo_loss_needs_no_model():
    logprobs = torch.tensor([0.0, -1.0, -3.0], requires_grad=True)
    samples = [
        Sample(tokens=[1, 2, 3], loss_mask=[0, 1, 1], reward=1.0, rollout_log_probs=logprobs),
        Sample(tokens=[1, 2], loss_mask=[0, 1], reward=0.0, rollout_log_probs=[0.0, -0.5], advantages=2.0),
    ]
    loss = compute_grpo_loss(samples, RLTrainingConfig(1, baseline=0.5))
    loss.backward()
    assert loss.item() == pytest.approx((0.5 * 2.0 + 2.0 * 0.5) / 2)
    assert logprobs.grad.tolist() == [0.0, -0.125, -0.125]
    assert compute_grpo_loss(samples).item() == pytest.approx((1.0 * 2.0 + 2.0 * 0.5) / 2)
    untrained = Sample(tokens=[1, 2], loss_mask=[0, 0], reward=0.0, rollout_log_probs=[0.0, -0.5])
    assert compute_grpo_loss([*samples, untrained]).item() == compute_grpo_loss(samples).item()
    for wrong, words in (([Sample(reward=1.0)], "sample 0 needs rollout_log_probs"), ([], "no samples")):
        with pytest.raises(TrainingError, match=words):
            compute_grpo_loss(wrong)


def test_rewards_and_advantages_of_a_batch():
    samples = [
        Sample(tokens=[1, 2, 3], loss_mask=[0.0, 1.0, 1.0], metadata={"correct": True}),
        Sample(tokens=[4], loss_mask=[0.0], metadata={"correct": False}),
    ]
    batch = convert_to_batch(samples, 0, 0)
    rewards = [compute_reward(sample) for sample in batch.samples]
    assert rewards == [1.0, 0.0] and compute_advantages(rewards) == rewards
    made = prepare_grpo_batch(batch, rewards, RLTrainingConfig(1, baseline=0.25))
    assert made["advantages"].tolist() == [0.75, -0.25] and made["advantages"].dtype == torch.float32
    assert made["input_ids"].tolist() == made["labels"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert made["loss_mask"].tolist() == [[0, 1, 1], [0, 0, 0]]
    with pytest.raises(TrainingError, match="2 rewards for 0 samples"):
        prepare_grpo_batch(RolloutBatch([], [], [], []), rewards, RLTrainingConfig(1))
