"""Losses over logits [B, L, V] and labels [B, L], for `PyTorchTrainingBackend`.

    backend = PyTorchTrainingBackend(model, optimizer, loss_fn=grpo_loss)

Labels are the token ids. These functions shift them: the logits at t score the label at t + 1. `rollouts run` has its
own losses, over the logprobs of trained tokens (`rollouts.training.algorithms.losses`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollouts.errors import TrainingError
from rollouts.training.algorithms.logprobs import token_logprobs
from rollouts.training.algorithms.losses import ppo_clip
from rollouts.types import Sample
from rollouts_notes.batches import compute_advantages


def label_logprobs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs [B, L] of `labels` [B, L], which are not shifted, and the entropy [B, L] of their predictions, from
    `logits` [B, L, V]. Both are 0.0 at position 0.
    """
    rows, length = labels.shape
    found = token_logprobs(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    logprobs, entropy = (nn.functional.pad(each.view(rows, length - 1), (1, 0)) for each in found)
    return logprobs, entropy


def _mean_by_row(values: Tensor, loss_mask: Tensor) -> Tensor:
    """The mean over the rows with a trained token of each row's mean over these, from position 1 on; 0 without one."""
    weights = loss_mask.to(values.dtype).clone()
    weights[:, 0] = 0.0
    totals = weights.sum(1)
    return ((values * weights).sum(1) / totals.clamp(min=1e-9)).sum() / (totals > 0).sum().clamp(min=1)


def grpo_loss(logits: Tensor, labels: Tensor, loss_mask: Tensor, advantages: Tensor) -> Tensor:
    """The simplified policy gradient: the mean of -A * (the mean logprob of the row's trained tokens).

    Rows without a trained token do not count. `logits` [B, L, V], `labels` [B, L], `loss_mask` [B, L], `advantages`
    [B]. Returns a scalar.

    >>> logits, ids = torch.zeros(1, 3, 8), torch.tensor([[1, 2, 3]])
    >>> round(grpo_loss(logits, ids, torch.tensor([[0, 1, 1]]), torch.tensor([2.0])).item() / 2, 4)  # log(8)
    2.0794
    """
    return -_mean_by_row(label_logprobs(logits, labels)[0] * advantages[:, None], loss_mask)


def ppo_loss(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor,
    clip_range: float = 0.2,
) -> Tensor:
    """PPO's clipped objective. `old_log_probs` [B, L] belong to the labels; other arguments are those of `grpo_loss`.

    Where the ratio is 1, the gradient is that of `grpo_loss`.
    """
    logprobs, _ = label_logprobs(logits, labels)
    values = ppo_clip(logprobs, old_log_probs, advantages[:, None], clip_low=clip_range, clip_high=clip_range)
    return _mean_by_row(values, loss_mask)


def compute_grpo_loss(samples: Sequence[Sample], config: Any = None) -> Tensor:
    """The value of `grpo_loss` for samples with `rollout_log_probs`; it needs no model.

    The advantage of a sample is its `advantages`, or its reward minus `config.baseline`. The gradient reaches
    `rollout_log_probs` that are a tensor with a gradient. Raises TrainingError if a sample has no logprobs or no
    reward.
    """
    if not samples:
        raise TrainingError("there are no samples; give one or more")
    terms = []
    for number, sample in enumerate(samples):
        if sample.rollout_log_probs is None or sample.reward is None:
            raise TrainingError(f"sample {number} needs rollout_log_probs [L] and a reward")
        given = getattr(sample, "advantages", None)
        if given is None:
            (given,) = compute_advantages([sample.reward], getattr(config, "baseline", None) or 0.0)
        values = torch.as_tensor(sample.rollout_log_probs) * torch.as_tensor(given)
        terms.append(-_mean_by_row(values[None], torch.as_tensor(sample.loss_mask)[None]))
    trained = sum(any(weight > 0 for weight in sample.loss_mask[1:]) for sample in samples)
    return torch.stack(terms).sum() / max(trained, 1)
