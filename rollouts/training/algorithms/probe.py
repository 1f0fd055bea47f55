"""Each of the core's own functions, called once on three tokens of two rollouts: a setting out of its domain is told
before a model loads. Functions of other packages are left for the first batch: they may not like invented numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rollouts.errors import ConfigError
from rollouts.plugins.signature import call_with
from rollouts.training.algorithms.aggregation import Masks, aggregate, aggregation_function
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, function_label, unwrapped
from rollouts.training.types import Unit

__all__ = ["probe_settings"]


def probe_settings(
    algorithm: Algorithm, reference: Callable[..., Any] | None = None, max_tokens: int | None = None
) -> None:
    """Raises ConfigError for a setting that one of the core's functions refuses. `max_tokens` is the run's."""
    aggregation = aggregation_function(algorithm.aggregation)
    available = _three_tokens(max_tokens)
    for function in _functions(algorithm, reference):
        if _is_core(function):
            call_with(function, available)
    if _is_core(aggregation):
        masks = Masks([[0.0, 1.0, 1.0], [0.0, 1.0]], [0, 1], [0, 0], [0, 0], max_tokens)
        _check_unit(algorithm, aggregate(aggregation, masks).unit, available)


def _check_unit(algorithm: Algorithm, unit: Unit, available: dict[str, Any]) -> None:
    """Refuse a term of the core's that does not return one value for each token, rollout or pair, as asked."""
    counts = {"token": 3, "rollout": 2, "pair": 1}
    for term in active_terms(algorithm):
        if not _is_core(term.function):
            continue
        found = len(call_with(term.function, available))
        if found != counts[unit]:
            gives = next(name for name, count in counts.items() if count == found)
            raise ConfigError(
                f"--aggregation {function_label(algorithm.aggregation)} takes one value a {unit}, and the loss "
                f"{function_label(term.function)} gives one a {gives}; type --aggregation "
                f"{'pair_mean' if gives == 'pair' else 'token_mean'}"
            )


def _is_core(function: Callable[..., Any]) -> bool:
    return str(getattr(unwrapped(function), "__module__", "")).startswith("rollouts.training.algorithms.")


def _functions(algorithm: Algorithm, reference: Callable[..., Any] | None) -> Iterator[Callable[..., Any]]:
    yield algorithm.advantage
    yield from (term.function for term in active_terms(algorithm))
    yield from algorithm.shaping
    kl = None if algorithm.kl is None else algorithm.kl.function
    for part in (kl, algorithm.correction, algorithm.mix, algorithm.select, algorithm.pairs, reference):
        if part is not None:
            yield part


def _three_tokens(max_tokens: int | None) -> dict[str, Any]:
    """Something for every name of every kind of function that an algorithm is made of."""
    import torch

    halves = torch.tensor([-0.5, -0.7, -0.9], dtype=torch.float64)
    numbers = torch.tensor([0, 0, 1])
    streams = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs")
    more = ("entropy", "values", "old_values", "returns", "token_rewards")
    alternatives = torch.tensor([[-0.5, -1.5], [-0.7, -1.2], [-0.6, -1.3]], dtype=torch.float64)
    return {
        **dict.fromkeys((*streams, *more), halves),
        **dict.fromkeys(("topk_logprobs", "teacher_topk_logprobs", "logits"), alternatives),
        "rollout_index": numbers,
        "group_index": numbers * 0,
        "teacher_topk_ids": numbers[:, None].expand(3, 2),
        "advantages": torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64),
        "rewards": torch.tensor([1.0, 0.0], dtype=torch.float64),
        "mask": torch.ones(3, dtype=torch.float64),
        "segments": numbers * 0,
        "pair_index": numbers * 0,
        "lengths": torch.tensor([1, 1]),
        "truncated": torch.tensor([False, False]),
        "turn_rewards": [[1.0], [0.0]],
        "parts": torch.tensor([[1.0, 0.5], [0.0, 0.5]], dtype=torch.float64),
        "weights": torch.ones(2, dtype=torch.float64),
        "max_tokens": max_tokens,
        "batch": None,
        "step": 0,
        **{name: [torch.zeros(1)] for name in ("reference", "policy", "adapters")},
        "version": 1,
    }
