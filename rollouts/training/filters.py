"""Group filters: they say whether the rollouts of one prompt are trained. Pure functions, no torch.

A filter names its inputs: `rewards` (as the advantage gets them; None for a rollout that was not judged), `scores` and
`parts` (as the rewards returned them), `samples`, `trajectories`, `step`. It returns True to keep the group, False to
drop it, or the reason to drop it, as text. The reason becomes the metric `group/drop/<reason>`.

The `check_*` functions do the same for `RolloutConfig(filter_fn=...)`. They take the samples of one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from rollouts.errors import ConfigError, near_misses

if TYPE_CHECKING:
    from rollouts.types import Sample

Value = TypeVar("Value")


def nonzero_std(rewards: Sequence[float | None], *, spread_min: float = 1e-6) -> bool | str:
    """Drop groups whose rewards are all equal: they have no gradient.

    Args:
        spread_min: the rewards differ if max - min is above this
    """
    judged = [reward for reward in rewards if reward is not None]
    if len(judged) < 2:
        return "fewer_than_two_rewards"
    return True if max(judged) - min(judged) > spread_min else "zero_std"


def accuracy_std(
    scores: Sequence[float | None],
    parts: Sequence[Mapping[str, float | None]],
    *,
    part: str = "",
    spread_min: float = 1e-6,
) -> bool | str:
    """Drop groups that are all right or all wrong, whatever the shaped rewards are. This is the dynamic sampling of
    DAPO, whose shaped rewards include a penalty for overlong replies. Also drops groups without the part. Raises
    ConfigError for a part whose name is almost that of another one.

    Args:
        part: the reward that says what is right; empty for the weighted sum of all rewards, before mixing and shaping
        spread_min: the rewards differ if max - min is above this
    """
    known = {name for each in parts for name in each}
    if part and part not in known:
        if near_misses(part, known):
            raise ConfigError(
                f"the filter accuracy_std: the rewards have no part {part!r}; they have {', '.join(sorted(known))}"
            )
        return f"no_part_{part}"
    # If one reward could not judge a rollout, the rollout is not trained, even if this part is known.
    both = zip(scores, parts, strict=True)
    chosen = [own.get(part) if part and score is not None else score for score, own in both]
    return nonzero_std(chosen, spread_min=spread_min)


def any_success(rewards: Sequence[float | None], *, threshold: float = 0.0) -> bool | str:
    """Drop groups in which no reward is above the threshold.

    Args:
        threshold: a reward above this is a success
    """
    return True if any(reward is not None and reward > threshold for reward in rewards) else "no_success"


def min_reward(rewards: Sequence[float | None], *, minimum: float = 0.0) -> bool | str:
    """Drop groups whose mean reward is below the minimum.

    Args:
        minimum: the lowest mean that is kept
    """
    return _mean_is_at_least(rewards, minimum) or "mean_reward_below_minimum"


def response_diversity(samples: Sequence[Sample], *, unique_frac_min: float = 0.5) -> bool | str:
    """Drop groups whose replies are mostly identical, token for token.

    Args:
        unique_frac_min: the smallest fraction of different replies that is kept
    """
    replies = _by_rollout(samples, _live_tokens)
    if not replies:
        return "no_samples"
    unique = {tuple(parts) for parts in replies.values()}
    return True if len(unique) / len(replies) >= unique_frac_min else "same_replies"


def reasonable_length(samples: Sequence[Sample], *, shortest: int = 1, longest: int = 1_000_000) -> bool | str:
    """Drop groups whose mean number of trained tokens per row is out of bounds.

    Args:
        shortest: tokens, inclusive
        longest: tokens, inclusive
    """
    lengths = [sum(1 for weight in sample.loss_mask if weight > 0) for sample in samples]
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    if mean < shortest:
        return "too_short"
    return True if mean <= longest else "too_long"


# --- the same for samples -------------------------------------------------------------------------------------------


def check_reward_nonzero_std(samples: Sequence[Sample]) -> bool:
    """Whether the rewards differ. A group with equal rewards has no gradient.

    >>> from rollouts.types import Sample
    >>> check_reward_nonzero_std([Sample(reward=0.0), Sample(reward=1.0)])
    True
    """
    return nonzero_std(_rewards(samples)) is True


def check_any_success(samples: Sequence[Sample], threshold: float = 0.0) -> bool:
    """Whether any reward is above the threshold."""
    return any_success(_rewards(samples), threshold=threshold) is True


def check_min_reward(samples: Sequence[Sample], min_reward: float = 0.0) -> bool:
    """Whether the mean reward is at least the minimum."""
    return _mean_is_at_least(_rewards(samples), min_reward)


def check_response_diversity(samples: Sequence[Sample], min_unique_ratio: float = 0.5) -> bool:
    """Whether at least this fraction of the replies differ, by their text, or by their tokens if there is no text."""
    replies = _by_rollout(samples, lambda sample: sample.response or _live_tokens(sample))
    unique = {tuple(parts) for parts in replies.values()}
    return bool(replies) and len(unique) / len(replies) >= min_unique_ratio


def check_reasonable_length(samples: Sequence[Sample], min_length: int = 1, max_length: int = 1_000_000) -> bool:
    """Whether the mean number of trained tokens lies within these bounds, inclusive."""
    return reasonable_length(samples, shortest=min_length, longest=max_length) is True


def check_quality_and_diversity(
    samples: Sequence[Sample], min_reward: float = 0.0, min_unique_ratio: float = 0.5
) -> bool:
    """Whether the rewards differ, their mean is high enough, and enough replies differ."""
    is_good = check_reward_nonzero_std(samples) and check_min_reward(samples, min_reward)
    return is_good and check_response_diversity(samples, min_unique_ratio)


def _mean_is_at_least(rewards: Sequence[float | None], minimum: float) -> bool:
    judged = [reward for reward in rewards if reward is not None]
    return bool(judged) and sum(judged) / len(judged) >= minimum


def _live_tokens(sample: Sample) -> tuple[int, ...]:
    """The tokens with a mask above 0."""
    return tuple(token for token, weight in zip(sample.tokens, sample.loss_mask, strict=True) if weight > 0)


def _rewards(samples: Sequence[Sample]) -> list[float | None]:
    """One reward for each rollout."""
    return [rewards[0] for rewards in _by_rollout(samples, lambda sample: sample.reward).values()]


def _by_rollout(samples: Sequence[Sample], read: Callable[[Sample], Value]) -> dict[object, list[Value]]:
    """Read a value from each row, by rollout. A row without a `rollout_index` is a rollout of its own."""
    found: dict[object, list[Value]] = {}
    for number, sample in enumerate(samples):
        key = number if sample.rollout_index is None else ("rollout", sample.rollout_index)
        found.setdefault(key, []).append(read(sample))
    return found
