"""Which rollouts of a group are trained, and which are compared. Pure functions of the rewards [J].

Legend: J rollouts of a group that are judged and not truncated. A selector returns bool [J]: which rollouts are
trained. It does not change the advantages, which are those of the whole group. A pairing returns (chosen, rejected)
positions. Rewards that differ by at most `SPREAD_MIN` are equal; equal rewards make no pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.training.algorithms.advantages import SPREAD_MIN
from rollouts.training.algorithms.losses import check_setting

if TYPE_CHECKING:
    from torch import Tensor


def reward_at_least(rewards: Tensor, *, threshold: float = 1.0) -> Tensor:
    """The rollouts whose reward is at least the threshold (rejection sampling): bool [J]. Tolerates rounding: 0.7 + 0.2
    + 0.1 is at least 1.

    Args:
        threshold: the lowest reward that is kept
    """
    check_setting("threshold", threshold, abs(threshold) < float("inf"), "a finite number", "--select.threshold 1")
    return rewards >= threshold - SPREAD_MIN


def top(rewards: Tensor, *, count: int = 1) -> Tensor:
    """The `count` best rollouts: bool [J]. Of rollouts with equal rewards, it takes the first.

    Args:
        count: how many rollouts of a group are kept
    """
    import torch

    check_setting("count", count, count >= 1, "a number of 1 or more", "--select.count 1")
    kept = torch.zeros_like(rewards, dtype=torch.bool)
    kept[rewards.argsort(descending=True, stable=True)[:count]] = True
    return kept


def max_variance(rewards: Tensor, *, count: int = 4) -> Tensor:
    """The `count` rollouts whose rewards have the largest variance (PODS, Xu et al. 2025): bool [J].

    The best choice is always some of the lowest and some of the highest, so only count + 1 choices are compared. Of
    equally good choices, it takes the one closest to half and half.

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
    # The first `low` positions, and the rest from the end.
    choices = [[*range(low), *range(size - (count - low), size)] for low in range(count + 1)]
    variances = [float(known[choice].var()) for choice in choices]
    # Choices that differ by rounding only are equally good.
    best = [low for low, variance in enumerate(variances) if variance >= max(variances) - SPREAD_MIN**2]
    kept = torch.zeros_like(rewards, dtype=torch.bool)
    kept[order[choices[min(best, key=lambda low: abs(2 * low - count))]]] = True
    return kept


def best_worst(rewards: Tensor) -> list[tuple[int, int]]:
    """The best rollout against the worst. Of rollouts with equal rewards, it takes the first; no pair if all are equal.

    >>> import torch
    >>> best_worst(torch.tensor([0.0, 1.0, 0.5]))
    [(1, 0)]
    """
    if rewards.numel() < 2 or float(rewards.max() - rewards.min()) <= SPREAD_MIN:
        return []
    return [(int(rewards.argmax()), int(rewards.argmin()))]


def all_pairs(rewards: Tensor, *, margin: float = 0.0, limit: int = 8) -> list[tuple[int, int]]:
    """Every better rollout against every worse one, at most `limit` pairs: those with the largest differences first.

    Args:
        margin: the smallest difference of a pair
        limit: at most this many pairs per group
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
