"""Group filters: may the rollouts of one prompt be trained on? Pure functions, no torch.

A filter names what it needs (`rewards` with None for what was not judged, `samples`, `trajectories`, `step`) and
returns True to keep the group, False to drop it, or a string: dropped, and why (it becomes `group/drop/<reason>`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollouts.types import Sample

__all__ = ["any_success", "min_reward", "nonzero_std", "reasonable_length", "response_diversity"]


def nonzero_std(rewards: Sequence[float | None], *, spread_min: float = 1e-6) -> bool | str:
    """Drop groups whose rewards are all the same: they have no gradient (dynamic sampling of DAPO).

    Args:
        spread_min: a spread of at most this is none
    """
    judged = [reward for reward in rewards if reward is not None]
    if len(judged) < 2:
        return "fewer_than_two_rewards"
    return True if max(judged) - min(judged) > spread_min else "zero_std"


def any_success(rewards: Sequence[float | None], *, threshold: float = 0.0) -> bool | str:
    """Drop groups in which no rollout earned more than the threshold.

    Args:
        threshold: a reward above this is a success
    """
    return True if any(reward is not None and reward > threshold for reward in rewards) else "no_success"


def min_reward(rewards: Sequence[float | None], *, minimum: float = 0.0) -> bool | str:
    """Drop groups whose mean reward is below the minimum.

    Args:
        minimum: the lowest mean that is kept
    """
    judged = [reward for reward in rewards if reward is not None]
    return True if judged and sum(judged) / len(judged) >= minimum else "mean_reward_below_minimum"


def response_diversity(samples: Sequence[Sample], *, unique_frac_min: float = 0.5) -> bool | str:
    """Drop groups whose rollouts mostly say the same, token for token.

    Args:
        unique_frac_min: the smallest kept share of different replies
    """
    replies: dict[object, list[tuple[int, ...]]] = {}
    for number, sample in enumerate(samples):
        live = tuple(token for token, weight in zip(sample.tokens, sample.loss_mask, strict=True) if weight > 0)
        key = number if sample.rollout_index is None else ("rollout", sample.rollout_index)
        replies.setdefault(key, []).append(live)
    if not replies:
        return "no_samples"
    unique = {tuple(parts) for parts in replies.values()}
    return True if len(unique) / len(replies) >= unique_frac_min else "same_replies"


def reasonable_length(samples: Sequence[Sample], *, shortest: int = 1, longest: int = 1_000_000) -> bool | str:
    """Drop groups whose mean number of trained tokens a row is out of bounds.

    Args:
        shortest: tokens, inclusive
        longest: tokens, inclusive
    """
    lengths = [sum(1 for weight in sample.loss_mask if weight > 0) for sample in samples]
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    if mean < shortest:
        return "too_short"
    return True if mean <= longest else "too_long"
