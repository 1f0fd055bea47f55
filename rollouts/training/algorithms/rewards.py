"""Rewards of a group before the advantage. Mixers make one number of several; shapings change it. Pure functions.

Legend: J judged rollouts of a group (truncated ones too, because they are in the baseline), P rewards. `parts` [J, P]
are the values of each reward, float64; `weights` [P] are the rewards' weights. A mixer returns [J]; without a mixer,
the engine adds up weight * reward (like `weighted_sum`). A shaping takes rewards [J] and returns rewards [J].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.errors import ConfigError, TrainingError
from rollouts.training.algorithms.advantages import SPREAD_MIN, group_norm
from rollouts.training.algorithms.losses import check_setting

if TYPE_CHECKING:
    from torch import Tensor


def weighted_sum(parts: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the rewards: sum_p w_p r_p [J]."""
    return parts @ weights


def minimum(parts: Tensor, weights: Tensor) -> Tensor:
    """The lowest weighted reward: min_p w_p r_p [J]. A weight of 0 leaves a reward out."""
    counted = weights != 0
    if not bool(counted.any()):
        return parts.new_zeros(parts.shape[0])
    return (parts * weights)[:, counted].amin(1)


def product(parts: Tensor, weights: Tensor) -> Tensor:
    """The weighted product of the rewards: prod_p r_p^w_p [J]. All rewards must be high for a high product.

    Raises TrainingError for a negative reward, and for a reward of 0 with a weight below 0.
    """
    if bool((parts < 0).any()):
        what = f"the reward mixer product got a negative reward ({float(parts.min()):g}), which has no power"
        raise TrainingError(f"{what}; type --mix weighted_sum, or make the reward 0 or more")
    if bool(((parts == 0) & (weights < 0)).any()):
        what = "the reward mixer product got a reward of 0 with a weight below 0, and 0 to a negative power is infinite"
        raise TrainingError(f"{what}; give that reward a positive weight, or type --mix weighted_sum")
    return (parts**weights).prod(1)


def lexicographic(parts: Tensor, weights: Tensor, *, tolerance: float = 0.0) -> Tensor:
    """The rank within the group [J], 0 (worst) to 1 (best). Rollouts are sorted by the first reward; those with equal
    first rewards by the second, and so on.

    Rewards are in the order in which they were given. With a weight below 0, less is better; a weight of 0 leaves a
    reward out. Tied rollouts share a rank. Neighboring ranks have equal distances. The rank is 0 if all are tied.
    >>> import torch
    >>> lexicographic(torch.tensor([[1.0, 30.0], [1.0, 20.0], [0.0, 5.0]]), torch.tensor([1.0, -0.1])).tolist()
    [0.5, 1.0, 0.0]

    Args:
        tolerance: two values count as equal if they differ by at most this; values are compared with the best of each
            tie
    """
    finite = 0 <= tolerance < float("inf")
    check_setting("tolerance", tolerance, finite, "a number of 0 or more", "--mix.tolerance 0.1")
    levels = [list(range(parts.shape[0]))]
    for part, sign in zip((parts * weights.sign()).unbind(1), weights.sign().tolist(), strict=True):
        if sign:
            scores = part.tolist()
            levels = [level for ties in levels for level in _levels(ties, scores, tolerance + SPREAD_MIN)]
    ranks = parts.new_zeros(parts.shape[0])
    for place, level in enumerate(reversed(levels)):
        ranks[level] = place / max(len(levels) - 1, 1)
    return ranks


def normalised_sum(parts: Tensor, weights: Tensor, *, eps: float = 1e-4) -> Tensor:
    """The weighted sum of normalized rewards: sum_p w_p (r_p - mean_p) / (std_p + eps) [J], ddof 1 (GDPO, Liu et al.
    2026).

    All rewards have the same scale within the group, so none dominates. A reward without spread adds 0.

    Args:
        eps: added to the deviation
    """
    import torch

    check_setting("eps", eps, 0 <= eps < float("inf"), "a number of 0 or more", "--mix.eps 1e-4")
    return torch.stack([group_norm(part, eps=eps) for part in parts.unbind(1)], 1) @ weights


def overlong(
    rewards: Tensor, lengths: Tensor, max_tokens: int | None, *, buffer: int | None = None, factor: float = 1.0
) -> Tensor:
    """Overlong penalty of DAPO: R + min(0, (L_max - buffer - length) / buffer) factor [J] (Yu et al. 2025, eq. 13).

    The penalty is 0 up to L_max - buffer tokens, then linear down to -factor at L_max = max_tokens. Raises
    ConfigError if the run has no max_tokens.

    Args:
        buffer: the penalty grows over this many tokens before L_max; none: a quarter of max_tokens
        factor: the penalty at L_max
    """
    if max_tokens is None:
        what = "the reward shaping overlong needs the longest allowed reply, and this run has no max_tokens"
        raise ConfigError(f"{what}; type --max-tokens with a number of tokens")
    width = max(1, max_tokens // 4) if buffer is None else buffer
    expected = f"a number from 1 to max_tokens ({max_tokens}), or none"
    example = f"--shaping.overlong.buffer {max(1, max_tokens // 4)}"
    check_setting("buffer", buffer, 1 <= width <= max_tokens, expected, example)
    check_setting("factor", factor, 0 <= factor < float("inf"), "a number of 0 or more", "--shaping.overlong.factor 1")
    excess = lengths.to(rewards.dtype) - (max_tokens - width)
    return rewards - excess.clamp(min=0) / width * factor


def _levels(ties: list[int], scores: list[float], within: float) -> list[list[int]]:
    """Split tied rollouts by their scores, best first. A level has scores down to `within` below its best."""
    levels: list[list[int]] = []
    best = 0.0
    for place in sorted(ties, key=lambda place: -scores[place]):
        if levels and best - scores[place] <= within:
            levels[-1].append(place)
        else:
            levels.append([place])
            best = scores[place]
    return levels
