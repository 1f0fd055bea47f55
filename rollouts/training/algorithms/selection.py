"""Which rollouts of a group are trained on, and which are compared: functions of the rewards [J]. Pure functions.

Legend: J rollouts of a group that may be trained on, judged and not truncated. A selector returns bool [J]. The
advantages are those of the whole group: a selector says what is trained on, never what it is compared with. A pairing
returns (chosen, rejected) positions. Rewards that differ by at most `SPREAD_MIN` are equal, and equal ones are no pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.training.algorithms.advantages import SPREAD_MIN
from rollouts.training.algorithms.losses import check_setting

if TYPE_CHECKING:
    from torch import Tensor


def reward_at_least(rewards: Tensor, *, threshold: float = 1.0) -> Tensor:
    """Where R >= threshold: bool [J] (rejection sampling). Rounding is forgiven: 0.7 + 0.2 + 0.1 is at least 1.

    Args:
        threshold: the lowest reward that is kept
    """
    check_setting("threshold", threshold, abs(threshold) < float("inf"), "a finite number", "--select.threshold 1")
    return rewards >= threshold - SPREAD_MIN


def top(rewards: Tensor, *, count: int = 1) -> Tensor:
    """The `count` best: bool [J]; of equal ones the first.

    Args:
        count: how many rollouts of a group are kept
    """
    import torch

    check_setting("count", count, count >= 1, "a number of 1 or more", "--select.count 1")
    kept = torch.zeros_like(rewards, dtype=torch.bool)
    kept[rewards.argsort(descending=True, stable=True)[:count]] = True
    return kept


def max_variance(rewards: Tensor, *, count: int = 4) -> Tensor:
    """The `count` rollouts whose rewards have the largest variance: bool [J] (PODS, Xu et al. 2025).

    They are always some of the lowest and some of the highest, so only count + 1 choices are looked at; of equally good
    choices the one nearest to half and half.

    Args:
        count: how many rollouts of a group are kept
    """
    import torch

    check_setting("count", count, count >= 2, "a number of 2 or more", "--select.count 4")
    size = rewards.shape[0]
    if size <= count:
        return torch.ones_like(rewards, dtype=torch.bool)
    order = rewards.argsort(stable=True)
    known = (rewards - rewards.mean())[order]
    choices = [_ends(low, count, size) for low in range(count + 1)]
    variances = [float(known[choice].var()) for choice in choices]
    # Choices that differ by rounding only are equal.
    best = [low for low, variance in enumerate(variances) if variance >= max(variances) - SPREAD_MIN**2]
    kept = torch.zeros_like(rewards, dtype=torch.bool)
    kept[order[choices[min(best, key=lambda low: abs(2 * low - count))]]] = True
    return kept


def best_worst(rewards: Tensor) -> list[tuple[int, int]]:
    """The best against the worst, the first of equal ones; no pair where all are equal.

    >>> import torch
    >>> best_worst(torch.tensor([0.0, 1.0, 0.5]))
    [(1, 0)]
    """
    if rewards.numel() < 2 or float(rewards.max() - rewards.min()) <= SPREAD_MIN:
        return []
    return [(int(rewards.argmax()), int(rewards.argmin()))]


def all_pairs(rewards: Tensor, *, margin: float = 0.0, limit: int = 8) -> list[tuple[int, int]]:
    """Every better one against every worse one, at most `limit` pairs: the largest differences, then the first.

    Args:
        margin: the smallest difference that makes a pair
        limit: at most this many pairs of a group
    """
    check_setting("margin", margin, 0 <= margin < float("inf"), "a number of 0 or more", "--pairs.margin 0.5")
    check_setting("limit", limit, limit >= 1, "a number of 1 or more", "--pairs.limit 8")
    values = rewards.tolist()
    found = []
    for chosen, better in enumerate(values):
        for rejected, worse in enumerate(values):
            difference = better - worse
            if difference > SPREAD_MIN and difference >= margin - SPREAD_MIN:
                found.append((-round(difference / SPREAD_MIN), chosen, rejected))
    return [(chosen, rejected) for _, chosen, rejected in sorted(found)[:limit]]


def _ends(low: int, count: int, size: int) -> list[int]:
    """The positions of the first `low` of `size`, and of as many of the last as make it `count`."""
    return [*range(low), *range(size - (count - low), size)]
