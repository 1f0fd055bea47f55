"""Off-policy corrections: how much a token counts if another engine sampled it.

Legend: T tokens of a batch, mu the sampler (`rollout_logprobs`), pi_old the trainer before the step (`old_logprobs`).
A correction returns detached weights [T]. They multiply the loss's numerator, never its denominator. A weight counts
once: the engine only calls the correction if the loss's own ratio starts at pi_old. Values at masked positions are
ignored, and weigh 1. NaN at a live position stays NaN, so that the engine can report it. An invalid setting raises
ConfigError. Not here: a product over a sequence, because it shrinks or grows with the length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.training.algorithms.losses import check_setting, log_ratio, mean_by_rollout

if TYPE_CHECKING:
    from torch import Tensor


def truncated(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, cap: float = 2.0) -> Tensor:
    """Truncated importance sampling: min(pi_old / mu, cap) [T] (TIS, Yao et al. 2025).

    Args:
        cap: the largest weight of a token
    """
    check_setting("cap", cap, cap > 0, "a number above 0", "--correction.cap 2")
    return _ratio(old_logprobs, rollout_logprobs, mask).clamp(max=cap)


def icepop(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: float = 0.5, high: float = 5.0
) -> Tensor:
    """Masked importance sampling: pi_old / mu [T] if it is in [low, high], else 0 (IcePop, Ring-1T 2025).

    Args:
        low: tokens with a smaller ratio are left out
        high: tokens with a larger ratio are left out
    """
    _check_bounds(low, high)
    ratio = _ratio(old_logprobs, rollout_logprobs, mask)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def sequence_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    rollout_index: Tensor,
    *,
    low: float = 0.9,
    high: float = 1.1,
) -> Tensor:
    """Keep or leave out whole rollouts, by their mean ratio (Liu, Li et al. 2025).

    1 if the geometric mean of pi_old / mu over the rollout's live tokens is in [low, high], else 0; [T].

    The mean over many tokens is much closer to 1 than the ratio of one token. The bounds do not depend on the length.

    Args:
        low: rollouts with a smaller mean ratio are left out
        high: rollouts with a larger mean ratio are left out
    """
    _check_bounds(low, high)
    mean = mean_by_rollout(log_ratio(old_logprobs, rollout_logprobs), mask, rollout_index).exp()
    kept = ((mean >= low) & (mean <= high)).to(mean.dtype)
    return kept.where(~mean.isnan(), mean)


def _ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    return log_ratio(old_logprobs, rollout_logprobs).where(mask > 0, 0.0).exp()


def _check_bounds(low: float, high: float) -> None:
    check_setting("low", low, 0 <= low <= 1, "a number from 0 to 1", "--correction.low 0.5")
    check_setting("high", high, high >= 1, "a number of 1 or more", "--correction.high 5")
