"""An algorithm is a composition: an advantage, an aggregation and terms (a loss and its coefficient), in a NamedTuple.

Here are the functions that put one together (`as_algorithm`, `bind_algorithm`), check it before any model loads
(`needs`, `check_needs`) and evaluate it on tensors (`evaluate`). What the terms mean stands in losses.py. No torch is
imported until an algorithm is evaluated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.errors import ConfigError, RolloutsError, SignatureError, TrainingError, near_misses, words_of
from rollouts.training.algorithms.advantages import group_norm
from rollouts.training.algorithms.aggregation import check_aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from rollouts.plugins.signature import Setting

__all__ = [
    "ADVANTAGE_AVAILABLE",
    "AVAILABLE",
    "Algorithm",
    "Evaluation",
    "Term",
    "algorithm_settings",
    "as_algorithm",
    "bind_algorithm",
    "check_advantage",
    "check_needs",
    "evaluate",
    "function_label",
    "needs",
    "setting_of",
]

# What a loss may name while a run has neither reference, teacher nor critic.
AVAILABLE: frozenset[str] = frozenset(
    {
        "advantages",
        "entropy",
        "group_index",
        "logprobs",
        "mask",
        "old_logprobs",
        "rewards",
        "rollout_index",
        "rollout_logprobs",
        "step",
    }
)

# What an advantage may name: it is called once a group.
ADVANTAGE_AVAILABLE: frozenset[str] = frozenset({"lengths", "rewards"})

_MISSING = {
    "logits": "this run does not keep logits (memory: tokens x vocabulary); `logprobs` and `entropy` are there",
    "old_values": "this run has no critic",
    "pair_index": "this run makes no pairs of rollouts",
    "ref_logprobs": "this run has no reference model",
    "returns": "this run has no critic, so there are no returns",
    "teacher_logprobs": "this run has no teacher model",
    "teacher_topk_ids": "this run has no teacher model",
    "teacher_topk_logprobs": "this run has no teacher model",
    "topk_logprobs": "this run has no teacher model whose top tokens could be scored",
    "values": "this run has no critic",
}


class Term(NamedTuple):
    """One loss function and the number that its values are multiplied by."""

    function: Callable[..., Any]
    coefficient: float = 1.0


class Algorithm(NamedTuple):
    """What to train with: `advantage` (per group), one `aggregation`, and `terms` whose values [T] are summed."""

    advantage: Callable[..., Any]
    aggregation: str
    terms: tuple[Term, ...]


class Evaluation(NamedTuple):
    """The summed values [T] (0 where masked), the terms' own metrics, and per term whether it was NaN at a live
    position.
    """

    values: Tensor
    metrics: dict[str, Tensor]
    nan: dict[str, Tensor]


def as_algorithm(component: Any) -> Algorithm:
    """An Algorithm as it is; a bare loss function with the usual advantage and aggregation. Raises SignatureError."""
    if isinstance(component, Algorithm):
        return component
    if callable(component) and not isinstance(component, type):
        return Algorithm(group_norm, "token_mean", (Term(component),))
    raise SignatureError(
        f"a loss is a function of what it names (`def my_loss(logprobs, advantages)`) or an Algorithm of such "
        f"functions, but {component!r} is neither"
    )


def function_label(function: Callable[..., Any]) -> str:
    """The name under which a function is spoken of; settings bound by `partial` do not hide it."""
    return str(getattr(_unwrapped(function), "__name__", repr(function)))


def needs(algorithm: Algorithm) -> frozenset[str]:
    """The names that the algorithm's terms request. Raises SignatureError for a name outside the vocabulary."""
    return frozenset(name for term in algorithm.terms for name in _requests(term.function))


def check_needs(algorithm: Algorithm, available: Collection[str] = AVAILABLE) -> None:
    """Refuse, before any model loads, a term that names what this run cannot give. Raises SignatureError."""
    for term in algorithm.terms:
        for name in _requests(term.function):
            if name in available:
                continue
            reason = _MISSING.get(name, f"this run does not offer `{name}`")
            raise SignatureError(
                f"the loss {function_label(term.function)} names `{name}`, but {reason}; it may name here: "
                f"{', '.join(sorted(available))}"
            )


def check_advantage(function: Callable[..., Any]) -> None:
    """Refuse, before any model loads, an advantage that names what this run cannot give. Raises SignatureError."""
    from rollouts.plugins.signature import check_signature

    for name in check_signature(_unwrapped(function), "advantages", function_label(function)).requests:
        if name not in ADVANTAGE_AVAILABLE:
            raise SignatureError(
                f"the advantage {function_label(function)} names `{name}`, but this run offers a group's "
                f"{' and '.join(f'`{each}`' for each in sorted(ADVANTAGE_AVAILABLE))} only"
            )


def algorithm_settings(algorithm: Algorithm) -> tuple[Setting, ...]:
    """The keyword-only settings of all terms, each name once, in the order of the terms."""
    found: dict[str, Setting] = {}
    for term in algorithm.terms:
        for setting in _read(term.function).settings:
            found.setdefault(setting.name, setting)
    return tuple(found.values())


def bind_algorithm(
    algorithm: Algorithm,
    loss_settings: Mapping[str, Any],
    advantage: Callable[..., Any] | None = None,
    advantage_settings: Mapping[str, Any] | None = None,
    aggregation: str | None = None,
) -> Algorithm:
    """The algorithm with settings bound to the terms that have them, and its advantage or aggregation replaced.

    Values are already of their types. Raises ConfigError for a setting that no term has, or an unknown aggregation.
    """
    known = [setting.name for setting in algorithm_settings(algorithm)]
    for name in loss_settings:
        if name not in known:
            close = near_misses(name, known)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"the loss has no setting {name!r}{hint} (settings: {', '.join(sorted(known)) or 'none'})"
            )
    chosen = aggregation or algorithm.aggregation
    check_aggregation(chosen)
    terms = tuple(Term(_bound(term.function, loss_settings), term.coefficient) for term in algorithm.terms)
    function = advantage or algorithm.advantage
    if advantage_settings:
        function = functools.partial(function, **advantage_settings)
    return Algorithm(function, chosen, terms)


def setting_of(algorithm: Algorithm, name: str) -> Any | None:
    """The value that a setting has in the first term that knows it: bound, else its default; None where no term
    does.
    """
    for term in algorithm.terms:
        function: Any = term.function
        while isinstance(function, functools.partial):
            if name in function.keywords:
                return function.keywords[name]
            function = function.func
        defaults = getattr(function, "__kwdefaults__", None) or {}
        if name in defaults:
            return defaults[name]
    return None


def evaluate(algorithm: Algorithm, available: Mapping[str, Any], mask: Tensor) -> Evaluation:
    """Call every term with what it names and sum coefficient * values; `mask` [T] says which positions are live.

    Masked positions are cut off by selection, so a NaN there changes neither value nor gradient. Raises TrainingError,
    naming the loss, for a value that is no tensor [T]. NaN at a live position is told by `nan`, so that no wait for the
    device happens here.
    """
    import torch

    count = mask.shape[0]
    live = mask > 0
    total: Tensor | None = None
    metrics: dict[str, Tensor] = {}
    nan: dict[str, Tensor] = {}
    for term in algorithm.terms:
        label = function_label(term.function)
        returned = _call_term(term.function, available, label)
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            returned, reported = returned
            metrics |= {name: _mean_of_live(value, live, label, name) for name, value in reported.items()}
        _check_values(returned, count, label)
        values = torch.where(live, returned, torch.zeros_like(returned))
        nan[label] = values.detach().isnan().any()
        total = values * term.coefficient if total is None else total + values * term.coefficient
    assert total is not None, "an algorithm has at least one term"
    return Evaluation(total, metrics, nan)


def _call_term(function: Callable[..., Any], available: Mapping[str, Any], label: str) -> Any:
    """The term's values as it returns them. Raises TrainingError, naming it, for whatever its code raises."""
    try:
        return function(*[available[name] for name in _requests(function)])
    except RolloutsError:
        raise
    except Exception as error:  # the author's code may raise anything
        raise TrainingError(f"the loss {label} raised {words_of(error)}") from error


def _mean_of_live(value: Any, live: Tensor, label: str, name: str) -> Tensor:
    """A term's own metric as the sum over live positions; a scalar counts at each of them. The engine divides by
    their number.
    """
    import torch

    metric = torch.as_tensor(value).detach().to(device=live.device, dtype=torch.float32)
    if metric.dim() == 0:
        return metric * live.sum()
    if metric.shape != live.shape:
        raise TrainingError(
            f"the loss {label} reports {name!r} with shape {tuple(metric.shape)}; "
            f"a metric is one number, or has shape [{live.shape[0]}]"
        )
    return torch.where(live, metric, torch.zeros_like(metric)).sum()


def _check_values(values: Any, count: int, label: str) -> None:
    import torch

    expected = f"one value a token, shape [{count}]: unreduced, for the engine masks, weighs and normalises"
    if not isinstance(values, torch.Tensor):
        raise TrainingError(f"the loss {label} returned {type(values).__name__}; it has to return {expected}")
    if values.dim() == 0:
        raise TrainingError(
            f"the loss {label} returned a scalar; it has to return {expected} (drop its .mean() or .sum())"
        )
    if tuple(values.shape) != (count,):
        raise TrainingError(f"the loss {label} returned shape {list(values.shape)}; it has to return {expected}")


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _bound(function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    own = {setting.name for setting in _read(function).settings}
    chosen = {name: value for name, value in settings.items() if name in own}
    return functools.partial(function, **chosen) if chosen else function


def _read(function: Callable[..., Any]) -> Any:
    from rollouts.plugins.signature import check_signature

    inner = _unwrapped(function)
    return _read_once(inner) if _is_hashable(inner) else check_signature(inner, "losses", function_label(inner))


@functools.lru_cache(maxsize=256)
def _read_once(inner: Callable[..., Any]) -> Any:
    from rollouts.plugins.signature import check_signature

    return check_signature(inner, "losses", function_label(inner))


def _requests(function: Callable[..., Any]) -> tuple[str, ...]:
    requests: tuple[str, ...] = _read(function).requests
    return requests


def _is_hashable(value: object) -> bool:
    return type(value).__hash__ is not None
