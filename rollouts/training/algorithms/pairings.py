"""Which rollouts of a group are compared: rewards [J] in, (chosen, rejected) positions out. Pure functions.

Legend: J rollouts of a group that may be trained on, judged and not truncated. Rewards that differ by at most
`SPREAD_MIN` are equal, and equal ones are no pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.training.algorithms.advantages import SPREAD_MIN
from rollouts.training.algorithms.losses import check_setting

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["all_pairs", "best_worst"]


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
