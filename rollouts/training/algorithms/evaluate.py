"""An algorithm on tensors: every term is called with what it names; values are summed, metrics gathered.

Left out: weights and denominators (aggregation.py), and where the tensors come from (the training backend).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from rollouts.author_code import authors_code, printable, shown
from rollouts.errors import TrainingError, words_of
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, function_label, is_reward_placed, requests
from rollouts.training.algorithms.calls import call_author, wrong_result
from rollouts.training.types import Unit

if TYPE_CHECKING:
    from torch import Tensor

MetricKind = Literal["mean", "sum", "max", "min"]
_KINDS = get_args(MetricKind)


class Metric(NamedTuple):
    """A number that adds up over microbatches and ranks: sums and counts are added, extremes compared.

    A mean is `value / number`; of the other kinds `number` is not used.
    """

    value: Tensor
    number: Tensor
    kind: MetricKind


class Evaluation(NamedTuple):
    """The summed values: [T] one a token (0 where masked), or [U] one a rollout or pair, in the order of their
    numbers. `metrics` are what the terms report; `nan` says of each term whether it was NaN where it counts.
    """

    values: Tensor
    metrics: dict[str, Metric]
    nan: dict[str, Tensor]


def evaluate(
    algorithm: Algorithm,
    available: Mapping[str, Any],
    mask: Tensor,
    *,
    unit: Unit = "token",
    kl_coefficient: float | None = None,
    weights: Tensor | None = None,
) -> Evaluation:
    """Call every term with what it names and sum coefficient * values; `mask` [T] says which positions are live.

    `weights` [T] (of an off-policy correction) multiply the terms whose values are means over what was sampled: those
    that name `advantages` or `old_logprobs`. Values at masked positions are cut off, so a NaN there changes none; its
    gradient may still be NaN where a term multiplies by it, so a backend hands over live tokens only.
    Raises TrainingError, naming the loss, for values that are no tensor of the expected shape. NaN is left to `nan`, so
    that no wait for the device happens here.
    """
    live, expected = _expected(available, mask, unit)
    total: Tensor | None = None
    metrics: dict[str, Metric] = {}
    nan: dict[str, Tensor] = {}
    parts = [(term.function, term.coefficient, "losses") for term in active_terms(algorithm)]
    kl = algorithm.kl
    if kl is not None and not is_reward_placed(kl.function):
        parts.append((kl.function, kl.coefficient if kl_coefficient is None else kl_coefficient, "kl"))
    for function, coefficient, kind in parts:
        label = function_label(function)
        returned = call_author("loss", function, available)
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            returned, reported = returned
            metrics |= dict(_metric(name, value, live, label) for name, value in reported.items())
        _check_values(returned, live, function, expected)
        values = returned.where(live, 0)
        nan[label] = values.detach().isnan().any()
        if kind == "kl" and kl is not None and kl.threshold is not None:
            values = values.clamp(max=kl.threshold)
        if weights is not None and not {"advantages", "old_logprobs"}.isdisjoint(requests(function, kind)):
            values = values * weights
        total = values * coefficient if total is None else total + values * coefficient
    assert total is not None, "an algorithm has at least one term that counts"
    return Evaluation(total, metrics, nan)


def importance_weights(algorithm: Algorithm, available: Mapping[str, Any], mask: Tensor) -> Tensor | None:
    """The correction's weights [T], detached; None where there is no correction. Raises TrainingError, naming it."""
    import torch

    function = algorithm.correction
    if function is None:
        return None
    with torch.no_grad():
        weights = call_author("off-policy correction", function, available)
    if not isinstance(weights, torch.Tensor) or weights.shape != mask.shape or weights.isnan().any():
        shape = str(list(weights.shape)) if isinstance(weights, torch.Tensor) else type(weights).__name__
        expected = f"one number a token, shape [{mask.shape[0]}], and no NaN"
        raise wrong_result("off-policy correction", function, shape, expected)
    return weights.detach()


def _expected(available: Mapping[str, Any], mask: Tensor, unit: Unit) -> tuple[Tensor, str]:
    """What is live of the values that there have to be, and the same in words."""
    import torch

    if unit == "token":
        words = f"shape [{len(mask)}]: unreduced, for the engine masks, weighs and normalizes"
        return mask > 0, f"one value a token, {words}"
    numbers = available[f"{unit}_index"].unique()
    words = f"one value a {unit}, shape [{len(numbers)}], in the order of their numbers in `{unit}_index`"
    return torch.ones_like(numbers, dtype=torch.bool), words


def _metric(given_name: Any, reported: Any, live: Tensor, label: str) -> tuple[str, Metric]:
    """A term's own metric: a value, or (value, kind). A value is one number, or has the shape of the loss's values."""
    import torch

    if not isinstance(given_name, str):
        raise TrainingError(f"the loss {label} reports a metric named {shown(given_name)}; its name must be text")
    name = printable(given_name)
    value, given = reported if isinstance(reported, tuple) and len(reported) == 2 else (reported, "mean")
    reports = f"the loss {label} reports {name!r}"
    if not isinstance(given, str) or given not in _KINDS:
        raise TrainingError(f"{reports} of kind {shown(given)} (choices: {', '.join(_KINDS)})")
    kind = cast(MetricKind, given)
    try:
        with authors_code():
            metric = torch.as_tensor(value).detach().to(device=live.device, dtype=torch.float32)
    except Exception as error:  # an object of the author's own may raise anything
        raise TrainingError(f"{reports} as {shown(value)}, which is no number: {words_of(error)}") from error
    count = live.sum().float()
    if metric.dim() == 0:
        return name, Metric(metric * count if kind == "mean" else metric, count, kind)
    if metric.shape != live.shape:
        shape = f"shape {list(metric.shape)}; a metric is one number, or has shape [{live.shape[0]}]"
        raise TrainingError(f"{reports} with {shape}")
    kept = metric.where(live, {"max": -math.inf, "min": math.inf}.get(kind, 0.0))
    return name, Metric(kept.max() if kind == "max" else kept.min() if kind == "min" else kept.sum(), count, kind)


def _check_values(values: Any, live: Tensor, function: Any, expected: str) -> None:
    import torch

    if not isinstance(values, torch.Tensor):
        raise wrong_result("loss", function, type(values).__name__, expected)
    if values.dim() == 0:
        raise wrong_result("loss", function, "a scalar", f"{expected} (drop its .mean() or .sum())")
    if values.shape != live.shape:
        raise wrong_result("loss", function, f"shape {list(values.shape)}", expected)
