"""How per-token values become one number: the objective is sum(u * loss) / D.

Each aggregation gives u, with the mask in it, for every token of every row, and this batch's share of D. D is summed
over microbatches, calls and ranks, and divided once, in `optim_step`; so results do not depend on how a batch was
split. Pure functions on lists, no torch. A float mask weighs u and D alike; a rollout or group with nothing live
leaves D; rollouts are counted, not rows, so a rollout in several segments keeps one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from rollouts.errors import ConfigError, near_misses

__all__ = [
    "AGGREGATIONS",
    "Masks",
    "TokenWeights",
    "aggregate",
    "check_aggregation",
    "dr_grpo",
    "group_mean",
    "rollout_mean",
    "sum_all",
    "token_mean",
]


class Masks(NamedTuple):
    """What an aggregation sees: per row, its float mask [L], its rollout and its group; `l_max` only for dr_grpo
    (tokens).
    """

    masks: Sequence[Sequence[float]]
    rollout_index: Sequence[int]
    group_index: Sequence[int]
    l_max: int | None = None


class TokenWeights(NamedTuple):
    """u per row [L], the mask included, and the batch's share of D."""

    weights: list[list[float]]
    denominator: float


def token_mean(batch: Masks) -> TokenWeights:
    """Every live token counts the same: u = mask, D = sum of the mask."""
    weights = [list(mask) for mask in batch.masks]
    return TokenWeights(weights, float(sum(sum(row) for row in weights)))


def rollout_mean(batch: Masks) -> TokenWeights:
    """Every rollout counts the same: u = mask / live tokens of its rollout, D = live rollouts."""
    return _mean_within(batch.masks, batch.rollout_index)


def group_mean(batch: Masks) -> TokenWeights:
    """Every group counts the same: u = mask / live tokens of its group, D = live groups."""
    return _mean_within(batch.masks, batch.group_index)


def dr_grpo(batch: Masks) -> TokenWeights:
    """No length in the denominator (Dr. GRPO): u = mask / l_max, D = live rollouts. Raises ConfigError without
    `l_max`.
    """
    if batch.l_max is None or batch.l_max <= 0:
        raise ConfigError(
            f"the aggregation dr_grpo divides by a fixed number of tokens, but l_max is {batch.l_max}; "
            "give the longest reply that is allowed (the run's max_tokens)"
        )
    weights = [[value / batch.l_max for value in mask] for mask in batch.masks]
    live = {key for key, mask in zip(batch.rollout_index, batch.masks, strict=True) if any(mask)}
    return TokenWeights(weights, float(len(live)))


def sum_all(batch: Masks) -> TokenWeights:
    """The plain sum: u = mask, D = 1 for the whole batch."""
    return TokenWeights([list(mask) for mask in batch.masks], 1.0)


AGGREGATIONS: dict[str, Callable[[Masks], TokenWeights]] = {
    "dr_grpo": dr_grpo,
    "group_mean": group_mean,
    "rollout_mean": rollout_mean,
    "sum": sum_all,
    "token_mean": token_mean,
}


def check_aggregation(name: str) -> None:
    """Raises ConfigError for an unknown name, with the choices."""
    if name in AGGREGATIONS:
        return
    close = near_misses(name, AGGREGATIONS)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    if name.startswith("pair"):
        hint = ": this version makes no pairs of rollouts"
    raise ConfigError(f"unknown aggregation {name!r}{hint} (choices: {', '.join(sorted(AGGREGATIONS))})")


def aggregate(name: str, batch: Masks) -> TokenWeights:
    """The weights of the aggregation called `name`. Raises ConfigError for an unknown name, with the choices."""
    check_aggregation(name)
    return AGGREGATIONS[name](batch)


def _mean_within(masks: Sequence[Sequence[float]], keys: Sequence[Hashable]) -> TokenWeights:
    totals: dict[Hashable, float] = {}
    for key, mask in zip(keys, masks, strict=True):
        totals[key] = totals.get(key, 0.0) + sum(mask)
    weights = [
        [value / totals[key] for value in mask] if totals[key] > 0 else [0.0] * len(mask)
        for key, mask in zip(keys, masks, strict=True)
    ]
    return TokenWeights(weights, float(sum(total > 0 for total in totals.values())))
