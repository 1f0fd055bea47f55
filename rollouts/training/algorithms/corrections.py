"""Tokens that another engine, or earlier weights, sampled: what a ratio compares with, and how much a token counts.

What a run does about it is decided here, in this order. `runs.algorithms` composes its correction, which is `truncated`
if neither the user nor the algorithm has another.

    samples_current_weights   the run: whether all tokens of a step come from the weights at its beginning
    applied_stages            the run: a correction that it chose is left out if the trainer's own weights sample
    anchor_of                 a batch: whether its ratios compare with the sampler, or with the policy before this step
    needs_policy_pass         a batch: whether the policy scores it before the first optimizer step
    stored_anchors            that pass: what the rows keep as `old_logprobs`
    resolve_logprobs          a microbatch: the `old_logprobs` and `rollout_logprobs` of each token
    importance_weights        a microbatch: the weights of the correction

The `old_logprobs` of a token are the first of these that exist: those that its row keeps; with the anchor "sampler",
those that the sampler reported; the policy's in the training pass itself, without a gradient.

Legend: T tokens of a batch, mu the sampler (`rollout_logprobs`), pi_old the trainer before the step (`old_logprobs`).
A correction returns detached weights [T]. They multiply the loss's numerator, never its denominator. A weight counts
once: the trainer only calls the correction if the loss's own ratio starts at pi_old. Values at masked positions are
ignored, and weigh 1. NaN at a live position stays NaN, so that the trainer can report it. An invalid setting raises
ConfigError. Not here: a product over a sequence, because it shrinks or grows with the length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.training.algorithms.algorithm import Algorithm, Stage
from rollouts.training.algorithms.calls import call_author, wrong_result
from rollouts.training.algorithms.losses import check_setting, log_ratio, mean_by_rollout
from rollouts.training.batches import Anchor, TrainBatch, Unit

if TYPE_CHECKING:
    from torch import Tensor

    from rollouts.config.settings import Settings


def samples_current_weights(settings: Settings) -> bool:
    """Whether all tokens of a step are sampled with the weights at its beginning. A group that is carried over or
    prefetched, or a saved one, was sampled with older weights.
    """
    is_synchronous = settings.over_sampling == settings.sync_every == 1 and settings.staleness == 0
    return settings.samples and is_synchronous


def applied_stages(stages: Sequence[Stage], *, is_own_policy: bool) -> list[Stage]:
    """The stages as the loop applies them. `is_own_policy`: the trainer's own copy of the model samples all tokens,
    with the weights of the step. A correction that the run chose by itself would then weigh every token by 1.
    """
    return [stage.inside() for stage in stages] if is_own_policy else list(stages)


def anchor_of(algorithm: Algorithm, unit: Unit) -> Anchor:
    """What the ratios of a batch compare with.

    A correction already multiplies each token by policy / sampler. With the sampler as the anchor too, the ratio in the
    loss would apply this factor again, so the anchor is the policy before this step. A loss with a value per rollout or
    pair has no weight per token to correct: its ratio to the sampler is the correction.
    """
    return "current" if algorithm.correction is not None and unit == "token" else "sampler"


def needs_policy_pass(batch: TrainBatch, *, minibatches: int, by_token: bool) -> bool:
    """Whether the policy must score the batch before the first optimizer step. With one optimizer step and known
    sampler logprobs it need not: the training pass computes the policy's logprobs. It must

    - before several optimizer steps, if its logprobs are the anchor, because the first step changes the policy;
    - `by_token`: for advantages or a KL in the rewards that read logprobs which the sampler did not report.
    """
    unknown = any(row.rollout_logprobs is None and any(row.loss_mask) for row in batch.rows)
    return (minibatches > 1 and (batch.anchor == "current" or unknown)) or (unknown and by_token)


def stored_anchors(batch: TrainBatch, logprobs: Sequence[list[float]]) -> list[list[float]]:
    """The `old_logprobs` of each row, from the policy's pass. If the anchor is the sampler, its known logprobs stay."""
    if batch.anchor == "current":
        return list(logprobs)
    return [row.rollout_logprobs or own for row, own in zip(batch.rows, logprobs, strict=True)]


class TokenLogprobs(NamedTuple):
    """The logprobs [T] of a microbatch. `is_anchored`: the row keeps `old_logprobs`, or the sampler reported one."""

    old_logprobs: Tensor
    rollout_logprobs: Tensor
    is_anchored: Tensor


def resolve_logprobs(
    logprobs: Tensor, stored: Tensor | None, sampler: Tensor, is_known: Tensor, anchor: Anchor
) -> TokenLogprobs:
    """The logprobs that a loss may name, beside the policy's own `logprobs` [T] in this pass.

    Args:
        stored: the `old_logprobs` [T] of the rows, if they have any
        sampler: the logprobs [T] that the sampler reported, where `is_known`
    """
    import torch

    policy = logprobs.detach() if stored is None else stored
    rollout_logprobs = torch.where(is_known, sampler, policy)
    if stored is not None:
        return TokenLogprobs(stored, rollout_logprobs, torch.ones_like(is_known))
    return TokenLogprobs(rollout_logprobs if anchor == "sampler" else policy, rollout_logprobs, is_known)


def importance_weights(
    algorithm: Algorithm, available: Mapping[str, Any], mask: Tensor, anchor: Anchor = "current"
) -> Tensor | None:
    """The correction's weights [T], detached. None if there is no correction, and with the anchor "sampler", where the
    ratio of the loss is the importance weight. Raises TrainingError if the correction fails.
    """
    import torch

    function = algorithm.correction
    if function is None or anchor == "sampler":
        return None
    with torch.no_grad():
        weights = call_author("off-policy correction", function, available)
    if not isinstance(weights, torch.Tensor) or weights.shape != mask.shape or weights.isnan().any():
        shape = str(list(weights.shape)) if isinstance(weights, torch.Tensor) else type(weights).__name__
        expected = f"one number per token, shape [{mask.shape[0]}], and no NaN"
        raise wrong_result("off-policy correction", function, shape, expected)
    return weights.detach()


# --- corrections ------------------------------------------------------------------------------------------------------


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
