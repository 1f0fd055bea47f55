"""Losses: pure functions of what they name, one value a token.

Legend: T tokens of a batch. `logprobs` [T] carries the gradient; everything else is detached. A loss returns unreduced
values [T]; the engine masks, weighs and normalises them (aggregation.py), so no loss can get a denominator wrong. A
loss that wants to report something returns `(values, {"name": [T] or scalar})`. Left out here: KL terms, sequence
ratios, pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cross_entropy", "entropy_bonus", "importance", "ppo_clip", "reinforce"]


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """The clipped surrogate of PPO and GRPO (Schulman et al. 2017, eq. 7): -min(rA, clip(r, 1-low, 1+high) A) [T].

    Args:
        clip_low: how far the ratio may fall below 1
        clip_high: how far the ratio may rise above 1
    """
    import torch

    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The policy gradient of Williams (1992): -A log pi [T]."""
    return -advantages * logprobs


def importance(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The policy gradient corrected by the importance ratio, unclipped: -rA [T]."""
    return -(logprobs - old_logprobs).exp() * advantages


def cross_entropy(logprobs: Tensor) -> Tensor:
    """Supervised learning: -log pi [T]; the row's float mask weighs the tokens."""
    return -logprobs


def entropy_bonus(entropy: Tensor) -> Tensor:
    """-H [T]: as a term with a small coefficient it keeps the policy from collapsing."""
    return -entropy
