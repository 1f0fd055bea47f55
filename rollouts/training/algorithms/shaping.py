"""What is added to rewards, or taken off them, before the advantage: rewards [J] in, rewards [J] out. Pure functions.

Legend: J judged rollouts of a group, truncated ones included, for they are in the baseline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.errors import ConfigError
from rollouts.training.algorithms.losses import check_setting

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["overlong"]


def overlong(
    rewards: Tensor, lengths: Tensor, max_tokens: int | None, *, buffer: int | None = None, factor: float = 1.0
) -> Tensor:
    """R + min(0, (L_max - buffer - length) / buffer) factor [J]: the soft penalty of DAPO (Yu et al. 2025, eq. 13).

    Nothing up to L_max - buffer tokens, then linearly down to -factor at L_max = max_tokens. Raises ConfigError where
    the run has no max_tokens.

    Args:
        buffer: the last tokens before L_max, in which the penalty grows; none is a quarter of max_tokens
        factor: the penalty at L_max
    """
    if max_tokens is None:
        raise ConfigError(
            "the reward shaping overlong needs the longest reply that is allowed, and this run has no max_tokens; "
            "type --max-tokens with a number of tokens"
        )
    width = max(1, max_tokens // 4) if buffer is None else buffer
    expected = f"a number from 1 to max_tokens ({max_tokens}), or none"
    check_setting(
        "buffer", buffer, 1 <= width <= max_tokens, expected, f"--shaping.overlong.buffer {max(1, max_tokens // 4)}"
    )
    check_setting("factor", factor, 0 <= factor < float("inf"), "a number of 0 or more", "--shaping.overlong.factor 1")
    excess = lengths.to(rewards.dtype) - (max_tokens - width)
    return rewards - excess.clamp(min=0) / width * factor
