"""An algorithm on tensors: every term is called with what it names; values are summed, metrics gathered.

Left out: weights and denominators (aggregation.py), and where the tensors come from (the training backend).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from rollouts.author_code import authors_code, printable, shown
from rollouts.errors import RolloutsError, TrainingError, named, words_of
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, function_label
from rollouts.training.algorithms.needs import is_reward_placed, requests
from rollouts.training.types import Unit

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Evaluation", "Metric", "MetricKind", "evaluate", "importance_weights"]

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
    Raises TrainingError, naming the loss, for values that are no tensor of the expected shape. NaN is told by `nan`, so
    that no wait for the device happens here.
    """
    import torch

    live, count, expected = _expected(available, mask, unit)
    total: Tensor | None = None
    metrics: dict[str, Metric] = {}
    nan: dict[str, Tensor] = {}
    parts = [(term.function, term.coefficient, "losses") for term in active_terms(algorithm)]
    kl = algorithm.kl
    if kl is not None and not is_reward_placed(kl.function):
        parts.append((kl.function, kl.coefficient if kl_coefficient is None else kl_coefficient, "kl"))
    for function, coefficient, kind in parts:
        label = function_label(function)
        asked = requests(function, kind)
        returned = _call(function, asked, available, label)
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            returned, reported = returned
            reports = {_metric_name(name, label): value for name, value in reported.items()}
            metrics |= {name: _metric(value, live, label, name) for name, value in reports.items()}
        _check_values(returned, count, label, expected)
        values = torch.where(live, returned, torch.zeros_like(returned))
        nan[label] = values.detach().isnan().any()
        if kind == "kl" and kl is not None and kl.threshold is not None:
            values = values.clamp(max=kl.threshold)
        if weights is not None and not {"advantages", "old_logprobs"}.isdisjoint(asked):
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
    label = function_label(function)
    with torch.no_grad():
        weights = _call(function, requests(function, "corrections"), available, label, "off-policy correction")
    if not isinstance(weights, torch.Tensor) or weights.shape != mask.shape or weights.isnan().any():
        shape = list(weights.shape) if isinstance(weights, torch.Tensor) else type(weights).__name__
        raise TrainingError(
            f"the off-policy correction {label} returned {shape}; it has to return one number a token, shape "
            f"[{mask.shape[0]}], and no NaN"
        )
    return weights.detach()


def _expected(available: Mapping[str, Any], mask: Tensor, unit: Unit) -> tuple[Tensor, int, str]:
    """What is live, how many values there have to be, and the same in words."""
    import torch

    if unit == "token":
        count = mask.shape[0]
        words = f"one value a token, shape [{count}]: unreduced, for the engine masks, weighs and normalises"
        return mask > 0, count, words
    count = int(available[f"{unit}_index"].unique().numel())
    words = f"one value a {unit}, shape [{count}], in the order of their numbers in `{unit}_index`"
    return torch.ones(count, dtype=torch.bool, device=mask.device), count, words


def _call(
    function: Callable[..., Any], asked: tuple[str, ...], available: Mapping[str, Any], label: str, word: str = "loss"
) -> Any:
    """What the function returns. Raises TrainingError, naming it, for whatever its code raises."""
    arguments = [available[name] for name in asked]
    try:
        with authors_code():
            return function(*arguments)
    except RolloutsError:
        raise
    except Exception as error:  # the author's code may raise anything
        raise TrainingError(f"the {word} {label} raised {words_of(error)}") from error


def _metric_name(name: Any, label: str) -> str:
    if not isinstance(name, str):
        raise TrainingError(f"the loss {label} reports a metric named {shown(name)}; its name must be text")
    return printable(name)


def _metric(reported: Any, live: Tensor, label: str, name: str) -> Metric:
    """A term's own metric: a value, or (value, kind). A value is one number, or has the shape of the loss's values."""
    import torch

    value, given = reported if isinstance(reported, tuple) and len(reported) == 2 else (reported, "mean")
    if not isinstance(given, str) or given not in _KINDS:
        raise TrainingError(f"the loss {label} reports {name!r} of kind {shown(given)} (choices: {', '.join(_KINDS)})")
    kind = cast(MetricKind, given)
    try:
        with authors_code():
            metric = torch.as_tensor(value).detach().to(device=live.device, dtype=torch.float32)
    except Exception as error:  # an object of the author's own may raise anything
        raise TrainingError(
            f"the loss {label} reports {name!r} as {shown(value)}, which is no number: {named(error)}"
        ) from error
    count = live.sum().float()
    if metric.dim() == 0:
        return Metric(metric * count if kind == "mean" else metric, count, kind)
    if metric.shape != live.shape:
        raise TrainingError(
            f"the loss {label} reports {name!r} with shape {list(metric.shape)}; "
            f"a metric is one number, or has shape [{live.shape[0]}]"
        )
    if kind == "max":
        return Metric(torch.where(live, metric, -torch.inf).max(), count, kind)
    if kind == "min":
        return Metric(torch.where(live, metric, torch.inf).min(), count, kind)
    return Metric(torch.where(live, metric, torch.zeros_like(metric)).sum(), count, kind)


def _check_values(values: Any, count: int, label: str, expected: str) -> None:
    import torch

    if not isinstance(values, torch.Tensor):
        raise TrainingError(f"the loss {label} returned {type(values).__name__}; it has to return {expected}")
    if values.dim() == 0:
        raise TrainingError(
            f"the loss {label} returned a scalar; it has to return {expected} (drop its .mean() or .sum())"
        )
    if tuple(values.shape) != (count,):
        raise TrainingError(f"the loss {label} returned shape {list(values.shape)}; it has to return {expected}")
