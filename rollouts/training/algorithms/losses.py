"""Losses: pure functions whose parameters name their inputs. They return one value per token (`dpo`: one per pair).

Legend: T tokens of a batch, P pairs of rollouts, K alternatives of one token; pi the policy (`logprobs` [T], with
gradient), A `advantages`, r = pi / pi_old the ratio to `old_logprobs`. All inputs but pi are detached. Losses return
unreduced values. The trainer masks, weighs and normalizes them (aggregation.py), so no loss can use a wrong
denominator. To report metrics, a loss returns `(values, {"name": [T] or scalar})`. An invalid setting raises
ConfigError. Not here: KL terms (kl.py), and the weights of off-policy samples (corrections.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_MAX = 20.0
"""In nats. A larger log ratio only means "far apart", and its exponential could overflow."""


def log_ratio(new: Tensor, anchor: Tensor) -> Tensor:
    """log(new / anchor) of two logprobs, clamped to +-20 nats, in their shape. Clamped values have no gradient."""
    return (new - anchor).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def mean_by_rollout(values: Tensor, mask: Tensor, rollout_index: Tensor) -> Tensor:
    """Replace every value by the mean over its rollout's live tokens, weighed by the mask: [T].

    Values at masked positions are ignored, also NaN. The mean of a rollout without live tokens is 0.
    """
    import torch

    numbers, place = torch.unique(rollout_index, return_inverse=True)
    counted = values.where(mask > 0, 0.0) * mask
    zeros = counted.new_zeros(numbers.shape[0])
    totals = zeros.index_add(0, place, counted)
    weights = zeros.index_add(0, place, mask.to(zeros.dtype))
    return torch.where(weights > 0, totals / weights.where(weights > 0, 1.0), 0.0)[place]


def check_setting(name: str, value: float | str | None, is_valid: bool, expected: str, example: str) -> None:
    """Raise ConfigError if a setting is not valid. The message has its name, its value, and what to type instead."""
    if not is_valid:
        raise ConfigError(f"the setting {name} is {value}, but it has to be {expected}; type {example}")


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The policy gradient of Williams (1992): -A log pi [T]."""
    return -advantages * logprobs


def importance(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The policy gradient corrected by the importance ratio, unclipped: -rA [T]."""
    return -log_ratio(logprobs, old_logprobs).exp() * advantages


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped surrogate of PPO and GRPO (Schulman et al. 2017, eq. 7): -min(rA, clip(r, 1-low, 1+high) A) [T].

    With a dual clip c (Ye et al. 2020, eq. 5) the surrogate of A < 0 is at least cA, however large r is.

    Args:
        clip_low: how far the ratio may fall below 1
        clip_high: how far the ratio may rise above 1
        dual_clip: the largest ratio that counts if A < 0, a number above 1; none: no limit
    """
    is_valid = dual_clip is None or dual_clip > 1
    check_setting("dual_clip", dual_clip, is_valid, "a number above 1, or none", "--loss.dual-clip 3")
    surrogate = _clipped(log_ratio(logprobs, old_logprobs).exp(), advantages, clip_low, clip_high)
    if dual_clip is not None:
        surrogate = surrogate.maximum(dual_clip * advantages).where(advantages < 0, surrogate)
    return -surrogate


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    rollout_index: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """The clipped surrogate with the ratio of a whole rollout (GSPO-token, Zheng et al. 2025, eq. 13) [T].

    log r = stopgrad(mean log(pi / pi_old) over the rollout's live tokens) + log pi - stopgrad(log pi). The value is
    that of the sequence; the gradient is that of each token. Masked positions get 0. The ratios are much closer to 1
    than those of tokens, so the clip range is narrow.

    Args:
        clip_low: how far the rollout's ratio may fall below 1
        clip_high: how far the rollout's ratio may rise above 1
    """
    live = mask > 0
    mean = mean_by_rollout(log_ratio(logprobs.detach(), old_logprobs), mask, rollout_index)
    own_gradient = (logprobs - logprobs.detach()).where(live, 0.0)  # the value is 0
    ratio = (mean + own_gradient).exp()
    return -_clipped(ratio, advantages.where(live, 0.0), clip_low, clip_high)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> Tensor:
    """The policy gradient with a clipped weight (MiniMax 2025, eq. 4): -stopgrad(clip(r, 1-low, 1+high)) A log pi [T].

    Every token keeps its gradient; only its weight is limited.

    Args:
        clip_low: how far the weight may fall below 1; 1: no limit
        clip_high: how far the weight may rise above 1
    """
    _check_clip(clip_low, clip_high)
    weight = log_ratio(logprobs.detach(), old_logprobs).exp().clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs


def cross_entropy(logprobs: Tensor) -> Tensor:
    """Supervised learning: -log pi [T]. The row's float mask weighs the tokens."""
    return -logprobs


def entropy_bonus(entropy: Tensor) -> Tensor:
    """-H [T]. As a term with a small coefficient, it keeps the policy from becoming deterministic."""
    return -entropy


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float = 0.2) -> Tensor:
    """The critic's error: max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2 [T].

    This is the clipped form of the PPO reference code (Huang et al. 2022, detail 9). It is never below (v - R)^2 / 2.

    Args:
        value_clip: how far a prediction may move from its value before the step; inf: no limit
    """
    check_setting("value_clip", value_clip, value_clip > 0, "a number above 0", "--loss.value-clip 0.2")
    near = values.clamp(old_values - value_clip, old_values + value_clip)
    return 0.5 * ((values - returns) ** 2).maximum((near - returns) ** 2)


def dpo(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    pair_index: Tensor,
    *,
    beta: float = 0.1,
    nll_coef: float = 0.0,
) -> Tensor:
    """Direct preference optimization (Rafailov et al. 2023, eq. 7): -log sigmoid(beta (D_chosen - D_rejected)) [P].

    D is the sum of log(pi / pi_ref) over a rollout's tokens. `advantages` is +1 at tokens of the chosen rollout, -1 at
    those of the rejected one, and 0 where nothing is trained. The values are in the order of the pairs' numbers; -1 is
    no pair. The sums are not clamped, because they are never exponentiated.

    Args:
        beta: a larger beta keeps the policy closer to the reference
        nll_coef: adds so much of the chosen rollout's mean negative log likelihood per token (Pang et al. 2024, eq. 1).
            Without it, DPO may make both rollouts of a pair less likely
    """
    import torch

    check_setting("beta", beta, 0 < beta < float("inf"), "a number above 0", "--loss.beta 0.1")
    check_setting("nll_coef", nll_coef, 0 <= nll_coef < float("inf"), "a number of 0 or more", "--loss.nll-coef 1")
    live = (advantages != 0) & (pair_index >= 0)
    margins = (logprobs - ref_logprobs).where(live, 0.0) * advantages.where(live, 0.0)
    paired = pair_index >= 0
    numbers, place = torch.unique(pair_index[paired], return_inverse=True)
    differences = margins.new_zeros(numbers.shape[0]).index_add(0, place, margins[paired])
    losses = -torch.nn.functional.logsigmoid(beta * differences)
    if nll_coef:
        chosen = (live & (advantages > 0))[paired]
        nll = torch.zeros_like(differences).index_add(0, place, -logprobs[paired].where(chosen, 0.0))
        lengths = torch.zeros_like(differences).index_add(0, place, chosen.to(differences.dtype))
        losses = losses + nll_coef * nll / lengths.clamp(min=1)
    return losses


def distill_topk(topk_logprobs: Tensor, teacher_topk_logprobs: Tensor) -> Tensor:
    """Forward KL to a teacher over its K most likely tokens: sum_k p_T (log p_T - log p_S) - p_T + p_S; [T, K] -> [T].

    Over a whole vocabulary the last two terms add up to 0, and this is KL(teacher || student) (Hinton et al. 2015).
    Over K tokens they make it the KL of unnormalized measures: never negative, and 0 without gradient if the student
    equals the teacher. Without them, an equal student would still move all probability to the K tokens.
    """
    teacher = teacher_topk_logprobs.exp()
    apart = (teacher_topk_logprobs - topk_logprobs).where(teacher > 0, 0.0)
    return (teacher * apart - teacher + topk_logprobs.exp()).sum(-1)


def _check_clip(low: float, high: float) -> None:
    check_setting("clip_low", low, 0 <= low <= 1, "a number from 0 to 1", "--loss.clip-low 0.2")
    check_setting("clip_high", high, high >= 0, "a number of 0 or more", "--loss.clip-high 0.28")


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """min(rA, clip(r, 1-low, 1+high) A): clipping never increases the objective."""
    _check_clip(low, high)
    return (ratio * advantages).minimum(ratio.clamp(1 - low, 1 + high) * advantages)
