"""The objective of an algorithm on tensors: call every term with its inputs, add up the values, collect metrics.

Not here: weights and denominators (aggregation.py), and where the tensors come from (the training backend).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from rollouts.author_code import authors_code, printable, shown
from rollouts.errors import TrainingError, words_of
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, function_label, is_reward_placed, requests
from rollouts.training.algorithms.calls import call_author, wrong_result
from rollouts.training.batches import Unit

if TYPE_CHECKING:
    from torch import Tensor

MetricKind = Literal["mean", "sum", "max", "min"]
_KINDS = get_args(MetricKind)


class MetricSum(NamedTuple):
    """A number that can be added up over microbatches and ranks; for `max` and `min`, the extreme is kept.

    A mean is `value / number`. The other kinds do not use `number`.
    """

    value: Tensor
    number: Tensor
    kind: MetricKind


class Objective(NamedTuple):
    """The sum of the terms' values.

    `values` are [T], one per token (0 if masked), or [U], one per rollout or pair, in the order of their indices.
    `metrics` are reported by the terms. `nan` says for each term whether a live value is NaN.
    """

    values: Tensor
    metrics: dict[str, MetricSum]
    nan: dict[str, Tensor]


def evaluate_objective(
    algorithm: Algorithm,
    available: Mapping[str, Any],
    mask: Tensor,
    *,
    unit: Unit = "token",
    kl_coefficient: float | None = None,
    weights: Tensor | None = None,
) -> Objective:
    """Call every term with its inputs, and add up coefficient * values.

    Values at masked positions are set to 0, also if they are NaN. The gradient may still be NaN if a term multiplies by
    NaN, so a backend passes live tokens only. NaN at live tokens does not raise, because that would wait for the
    device; the result's `nan` reports it.

    Raises TrainingError, which names the loss or the KL estimator, if its values are not a tensor of the expected
    shape.

    Args:
        mask: [T], above 0 at live positions
        weights: [T] of a correction (`corrections.importance_weights`). They multiply the terms whose expectation is
            over sampled tokens: those that name `advantages` or `old_logprobs`
    """
    import torch

    # Which of the expected values are live: one per token, rollout or pair.
    is_token = unit == "token"
    live = mask > 0 if is_token else torch.ones_like(available[f"{unit}_index"].unique(), dtype=torch.bool)
    total: Tensor | None = None
    metrics: dict[str, MetricSum] = {}
    nan: dict[str, Tensor] = {}
    parts = [(term.function, term.coefficient, "losses") for term in active_terms(algorithm)]
    kl = algorithm.kl
    if kl is not None and not is_reward_placed(kl.function):
        parts.append((kl.function, kl.coefficient if kl_coefficient is None else kl_coefficient, "kl"))
    for function, coefficient, kind in parts:
        word, label = ("KL estimator" if kind == "kl" else "loss"), function_label(function)
        returned = call_author(word, function, available)
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            returned, reported = returned
            metrics |= dict(_metric(name, value, live, f"the {word} {label}") for name, value in reported.items())
        check_loss_values(word, returned, function, unit, len(live))
        values = returned.where(live, 0)
        nan[label] = values.detach().isnan().any()
        if kind == "kl" and kl is not None and kl.threshold is not None:
            values = values.clamp(max=kl.threshold)
        if weights is not None and not {"advantages", "old_logprobs"}.isdisjoint(requests(function, kind)):
            values = values * weights
        total = values * coefficient if total is None else total + values * coefficient
    assert total is not None, "an algorithm has a term with a coefficient"
    return Objective(total, metrics, nan)


def check_loss_values(word: str, values: Any, function: Any, unit: Unit, count: int) -> None:
    """Raise TrainingError if a loss or a KL estimator (`word`) returned anything but `count` values, one per unit."""
    import torch

    how = ": unreduced, because the trainer masks, weighs and normalizes"
    if unit != "token":
        how = f", in the order of their numbers in `{unit}_index`"
    expected = f"one value per {unit}, shape [{count}]{how}"
    if not isinstance(values, torch.Tensor):
        raise wrong_result(word, function, type(values).__name__, expected)
    if values.dim() == 0:
        raise wrong_result(word, function, "a scalar", f"{expected} (drop its .mean() or .sum())")
    if values.shape != (count,):
        raise wrong_result(word, function, f"shape {list(values.shape)}", expected)


def _metric(given_name: Any, reported: Any, live: Tensor, whose: str) -> tuple[str, MetricSum]:
    """A term's own metric: a value, or (value, kind). The value is a number, or has the shape of the loss's values."""
    import torch

    if not isinstance(given_name, str):
        raise TrainingError(f"{whose} reports a metric named {shown(given_name)}; its name must be text")
    name = printable(given_name)
    value, given = reported if isinstance(reported, tuple) and len(reported) == 2 else (reported, "mean")
    reports = f"{whose} reports {name!r}"
    if not isinstance(given, str) or given not in _KINDS:
        raise TrainingError(f"{reports} of kind {shown(given)} (choices: {', '.join(_KINDS)})")
    kind = cast(MetricKind, given)
    try:
        with authors_code():
            metric = torch.as_tensor(value).detach().to(device=live.device, dtype=torch.float32)
    except Exception as error:  # an author's object may raise anything
        raise TrainingError(f"{reports} as {shown(value)}, which is no number: {words_of(error)}") from error
    count = live.sum().float()
    if metric.dim() == 0:
        return name, MetricSum(metric * count if kind == "mean" else metric, count, kind)
    if metric.shape != live.shape:
        shape = f"shape {list(metric.shape)}; a metric is one number, or has shape [{live.shape[0]}]"
        raise TrainingError(f"{reports} with {shape}")
    kept = metric.where(live, {"max": -math.inf, "min": math.inf}.get(kind, 0.0))
    return name, MetricSum(kept.max() if kind == "max" else kept.min() if kind == "min" else kept.sum(), count, kind)
