"""Aggregation: how the values of tokens become one number. The objective is sum(u * loss) / D.

The parameters of an aggregation name its inputs (`masks`, `rollout_index`, `group_index`, `pair_index`, `max_tokens`).
It returns the weight u of every token of every row, with the mask as a factor, and this batch's part of D. The parts
are added up over microbatches, calls and ranks. `optim_step` divides once by their sum D, so the result does not depend
on how a batch was split. Pure functions on lists; no torch.

A float mask weighs u and D alike. Rollouts, groups and pairs without live tokens do not count in D. A rollout with
several rows counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from rollouts.errors import ConfigError, near_misses
from rollouts.training.algorithms.calls import call_author, wrong_result
from rollouts.training.batches import Unit


class Masks(NamedTuple):
    """The possible inputs of an aggregation, for R rows.

    Attributes:
        masks: R lists [L] of floats
        rollout_index: [R]
        group_index: [R]
        pair_index: [R]; -1: in no pair
        max_tokens: the longest allowed reply, or None
    """

    masks: Sequence[Sequence[float]]
    rollout_index: Sequence[int]
    group_index: Sequence[int]
    pair_index: Sequence[int] = ()
    max_tokens: int | None = None


class TokenWeights(NamedTuple):
    """u of each row [L], and the batch's part of D.

    `unit`: whether a loss returns one value per token, per rollout or per pair. The weight of a rollout or pair is the
    largest u of its tokens.
    """

    weights: list[list[float]]
    denominator: float
    unit: Unit = "token"


def token_mean(masks: Sequence[Sequence[float]]) -> TokenWeights:
    """Every live token counts equally: u = mask, D = sum of the mask."""
    weights = [list(mask) for mask in masks]
    return TokenWeights(weights, float(sum(sum(row) for row in weights)))


def rollout_mean(masks: Sequence[Sequence[float]], rollout_index: Sequence[int]) -> TokenWeights:
    """Every rollout counts equally: u = mask / live tokens of its rollout, D = live rollouts."""
    return _mean_within(masks, rollout_index)


def rollout_sum(masks: Sequence[Sequence[float]], rollout_index: Sequence[int]) -> TokenWeights:
    """A rollout counts by the sum of its tokens (RLOO, Ahmadian et al. 2024): u = mask, D = live rollouts.

    So a long rollout counts more than a short one.
    """
    return TokenWeights([list(mask) for mask in masks], float(len(_live_keys(masks, rollout_index))))


def group_mean(masks: Sequence[Sequence[float]], group_index: Sequence[int]) -> TokenWeights:
    """Every group counts equally: u = mask / live tokens of its group, D = live groups."""
    return _mean_within(masks, group_index)


def dr_grpo(
    masks: Sequence[Sequence[float]], rollout_index: Sequence[int], max_tokens: int | None, *, length: int | None = None
) -> TokenWeights:
    """No length in the denominator (Dr. GRPO, Liu et al. 2025): u = mask / L_max, D = live rollouts.

    Args:
        length: L_max in tokens; none: the run's max_tokens
    """
    divisor = max_tokens if length is None else length
    if divisor is None or divisor <= 0:
        what = f"the aggregation dr_grpo divides by a fixed number of tokens, but its length is {divisor}"
        raise ConfigError(f"{what}; type --aggregation.length with the longest allowed reply")
    weights = [[value / divisor for value in mask] for mask in masks]
    return TokenWeights(weights, float(len(_live_keys(masks, rollout_index))))


def per_rollout(masks: Sequence[Sequence[float]], rollout_index: Sequence[int]) -> TokenWeights:
    """For losses with one value per rollout: u = 1 if the rollout has live tokens, D = live rollouts."""
    live = _live_keys(masks, rollout_index)
    weights = [[float(value > 0) for value in mask] for mask in masks]
    return TokenWeights(weights, float(len(live)), "rollout")


def pair_mean(masks: Sequence[Sequence[float]], pair_index: Sequence[int]) -> TokenWeights:
    """For losses with one value per pair: u = 1, D = live pairs. A pair is live if one of its rows is."""
    live = _live_keys(masks, pair_index) - {-1}
    rows = zip(masks, pair_index, strict=True)
    weights = [[float(value > 0 and pair in live) for value in mask] for mask, pair in rows]
    return TokenWeights(weights, float(len(live)), "pair")


def sum_all(masks: Sequence[Sequence[float]]) -> TokenWeights:
    """The plain sum: u = mask, D = 1 for the whole batch."""
    return TokenWeights([list(mask) for mask in masks], 1.0)


_NAMED = (dr_grpo, group_mean, pair_mean, per_rollout, rollout_mean, rollout_sum, token_mean)
AGGREGATIONS: dict[str, Callable[..., TokenWeights]] = {each.__name__: each for each in _NAMED} | {"sum": sum_all}


def aggregation_function(aggregation: str | Callable[..., Any]) -> Callable[..., Any]:
    """The built-in aggregation of this name. A function is returned unchanged. Raises ConfigError, with the choices,
    for an unknown name.
    """
    if not isinstance(aggregation, str):
        return aggregation
    if aggregation in AGGREGATIONS:
        return AGGREGATIONS[aggregation]
    close = near_misses(aggregation, AGGREGATIONS)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"unknown aggregation {aggregation!r}{hint} (choices: {', '.join(sorted(AGGREGATIONS))})")


def aggregate(aggregation: str | Callable[..., Any], batch: Masks) -> TokenWeights:
    """The weights that an aggregation returns for this batch.

    Raises ConfigError for an unknown name, and TrainingError if an author's function fails; the message names the
    function.
    """
    function = aggregation_function(aggregation)
    pairs = batch.pair_index or [-1] * len(batch.masks)
    given = call_author("aggregation", function, batch._replace(pair_index=pairs)._asdict())
    if not isinstance(given, TokenWeights) or [len(row) for row in given.weights] != [len(row) for row in batch.masks]:
        expected = "TokenWeights(weights, denominator) with one weight for each token of each row"
        raise wrong_result("aggregation", function, type(given).__name__, expected)
    return given


def _live_keys(masks: Sequence[Sequence[float]], keys: Sequence[int]) -> set[int]:
    return {key for key, mask in zip(keys, masks, strict=True) if any(value > 0 for value in mask)}


def _mean_within(masks: Sequence[Sequence[float]], keys: Sequence[Hashable]) -> TokenWeights:
    totals: dict[Hashable, float] = {}
    for key, mask in zip(keys, masks, strict=True):
        totals[key] = totals.get(key, 0.0) + sum(mask)
    # If the total is 0, every value is 0 too.
    weights = [[value / (totals[key] or 1.0) for value in mask] for key, mask in zip(keys, masks, strict=True)]
    return TokenWeights(weights, float(sum(total > 0 for total in totals.values())))
