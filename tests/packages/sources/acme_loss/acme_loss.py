"""Three lines of mathematics: the clipped importance weight of the truncated policy gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from torch import Tensor


def acme_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, cap: Annotated[float, msgspec.Meta(gt=0)] = 2.0
) -> Tensor:
    """-min(r, cap) A log pi, with the ratio r detached.

    Args:
        cap: the largest weight
    """
    ratio = (logprobs - old_logprobs).exp().detach()
    weight = ratio.clamp(max=cap)
    return -weight * advantages * logprobs
