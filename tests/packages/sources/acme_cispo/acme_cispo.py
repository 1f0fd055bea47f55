from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def acme_cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> tuple[Tensor, dict[str, Any]]:
    """CISPO (MiniMax 2025): -stopgrad(clip(r, 1-low, 1+high)) A log pi [T].

    Args:
        clip_low: how far the weight may fall below 1
        clip_high: how far the weight may rise above 1
    """
    ratio = (logprobs.detach() - old_logprobs).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, {"capped_frac": (ratio > weight).float(), "weight_max": (weight, "max")}
