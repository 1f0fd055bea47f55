"""An algorithm is a composition of small pure functions in a NamedTuple; nothing is inherited from anything.

Here are the shapes (`Term`, `KL`, `Algorithm`) and the functions that put one together and bind its settings. What it
asks of a run stands in needs.py, what it computes in evaluate.py, what the terms mean in losses.py. No torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.errors import ConfigError, SignatureError, near_misses
from rollouts.training.algorithms.advantages import group_norm
from rollouts.training.algorithms.losses import check_setting, entropy_bonus

if TYPE_CHECKING:
    from rollouts.plugins.signature import Setting

__all__ = [
    "KL",
    "Algorithm",
    "Term",
    "active_terms",
    "algorithm_settings",
    "as_algorithm",
    "bind",
    "bind_algorithm",
    "function_label",
    "refuse_unknown",
    "setting_of",
    "unwrapped",
]

Function = Callable[..., Any]


class Term(NamedTuple):
    """One loss function and the number that its values are multiplied by.

    A term with a `name` lets its coefficient be set as `<name>_coef`; at 0 it is not computed.
    """

    function: Function
    coefficient: float = 1.0
    name: str = ""


class KL(NamedTuple):
    """A KL estimator against the reference policy, and how much it counts.

    A function that names `logprobs` is a term of the loss; one that does not is taken off the rewards of tokens. Values
    above `threshold` (nats a token) are cut to it. With a `target` (nats a token) the coefficient is steered: it grows
    by up to 0.2 / `horizon` a step while the KL is above the target, and falls likewise.
    """

    function: Function
    coefficient: float = 0.01
    threshold: float | None = None
    target: float | None = None
    horizon: int = 10


class Algorithm(NamedTuple):
    """What to train with. Every part is a function or a tuple of them; None is "not used".

    `advantage` (of a group, or of the whole batch if it names `batch`); one `aggregation` (a name of the core's, or a
    function); `terms`, whose values are summed; `kl` to the reference policy; `correction`, the weight of what another
    engine sampled (None: the run decides); `mix` (parts to rewards) and `shaping` (rewards to rewards) before the
    advantage; `select` (which rollouts are trained on) or `pairs` (which are compared); `filters` of groups.
    """

    advantage: Function
    aggregation: str | Function
    terms: tuple[Term, ...]
    kl: KL | None = None
    correction: Function | None = None
    mix: Function | None = None
    shaping: tuple[Function, ...] = ()
    select: Function | None = None
    pairs: Function | None = None
    filters: tuple[Function, ...] = ()


def as_algorithm(component: Any) -> Algorithm:
    """An Algorithm as it is; a bare loss function with the usual advantage, aggregation and an entropy term (0).

    A loss that names `pair_index` gets the usual pairs (best and worst of a group). Raises SignatureError.
    """
    if isinstance(component, Algorithm):
        return component
    if callable(component) and not isinstance(component, type):
        from rollouts.training.algorithms.needs import requests
        from rollouts.training.algorithms.pairings import best_worst

        own = {setting.name for setting in _settings(component)}
        entropy = () if "entropy_coef" in own else (Term(entropy_bonus, 0.0, "entropy"),)
        if "pair_index" in requests(component):
            return Algorithm(group_norm, "pair_mean", (Term(component),), pairs=best_worst)
        return Algorithm(group_norm, "token_mean", (Term(component), *entropy))
    raise SignatureError(
        f"a loss is a function of what it names (`def my_loss(logprobs, advantages)`) or an Algorithm of such "
        f"functions, but {component!r} is neither"
    )


def active_terms(algorithm: Algorithm) -> tuple[Term, ...]:
    """The terms that count: those without a coefficient of 0."""
    return tuple(term for term in algorithm.terms if term.coefficient != 0)


def unwrapped(function: Any) -> Any:
    """The function itself, without the settings that `partial` bound to it."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def function_label(function: Any) -> str:
    """The name under which a function is spoken of; settings bound by `partial` do not hide it."""
    if isinstance(function, str):
        return function
    return str(getattr(unwrapped(function), "__name__", repr(function)))


def algorithm_settings(algorithm: Algorithm) -> tuple[Setting, ...]:
    """The keyword-only settings of all terms, each name once, and the coefficients of the terms that have a name."""
    from rollouts.plugins.signature import Setting

    found: dict[str, Setting] = {}
    for term in algorithm.terms:
        for setting in _settings(term.function):
            bound = _keyword(term.function, setting.name)
            found.setdefault(setting.name, setting if bound is None else setting._replace(default=bound[0]))
        if term.name:
            name = f"{term.name}_coef"
            found.setdefault(name, Setting(name, float, term.coefficient, f"how much the {term.name} term counts"))
    return tuple(found.values())


def bind(function: Function, settings: Mapping[str, Any]) -> Function:
    """The function with these settings bound."""
    return functools.partial(function, **settings) if settings else function


def bind_algorithm(algorithm: Algorithm, settings: Mapping[str, Any]) -> Algorithm:
    """The algorithm with settings bound to the terms that have them. Values are already of their types.

    Raises ConfigError for a setting that no term has.
    """
    refuse_unknown("the loss", settings, [setting.name for setting in algorithm_settings(algorithm)])
    return algorithm._replace(terms=tuple(_bound_term(term, settings) for term in algorithm.terms))


def refuse_unknown(label: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raises ConfigError for the first of the `given` settings that is not a known one of `label`."""
    for name in given:
        if name not in known:
            close = near_misses(name, known)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{label} has no setting {name!r}{hint} (settings: {', '.join(sorted(known)) or 'none'})")


def setting_of(algorithm: Algorithm, name: str) -> Any | None:
    """The value that a setting has in the first term that knows it: bound, else its default; None where no term
    does.
    """
    for term in active_terms(algorithm):
        found = _keyword(term.function, name)
        if found is not None:
            return found[0]
        defaults = getattr(unwrapped(term.function), "__kwdefaults__", None) or {}
        if name in defaults:
            return defaults[name]
    return None


def _bound_term(term: Term, settings: Mapping[str, Any]) -> Term:
    own = {setting.name for setting in _settings(term.function)}
    function = bind(term.function, {name: value for name, value in settings.items() if name in own})
    coefficient = float(settings.get(f"{term.name}_coef", term.coefficient) if term.name else term.coefficient)
    flag = f"--loss.{term.name.replace('_', '-')}-coef"
    check_setting(f"{term.name}_coef", coefficient, math.isfinite(coefficient), "a finite number", f"{flag} 0.001")
    return Term(function, coefficient, term.name)


def _keyword(function: Any, name: str) -> tuple[Any] | None:
    """The value that a partial binds to `name`, in a tuple; None where none does."""
    while isinstance(function, functools.partial):
        if name in function.keywords:
            return (function.keywords[name],)
        function = function.func
    return None


def _settings(function: Any) -> tuple[Setting, ...]:
    from rollouts.training.algorithms.needs import signature_of

    settings: tuple[Setting, ...] = signature_of(unwrapped(function), "losses").settings
    return settings
