"""An algorithm: small pure functions, composed in a NamedTuple. Nothing is inherited.

Here are the types (`Term`, `KL`, `Algorithm`), and functions that compose algorithms, bind their settings, find what
they need from a run (by the names of parameters), and choose the algorithm of a step. objective.py computes an
algorithm, checks.py refuses bad algorithms, losses.py has the terms. No torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rollouts.author_code import unwrapped
from rollouts.config.settings import Setting
from rollouts.errors import ConfigError, SignatureError, near_misses
from rollouts.plugins.signature import Signature, bind, check_signature, read_signature
from rollouts.training.algorithms.advantages import group_norm
from rollouts.training.algorithms.losses import check_setting, entropy_bonus
from rollouts.training.algorithms.selection import best_worst

Function = Callable[..., Any]

FIRST = "main"
"""The name of a run's first stage."""


class Term(NamedTuple):
    """A loss function and the coefficient of its values.

    The setting `<name>_coef` of a named term sets its coefficient. A term with coefficient 0 is not computed.
    """

    function: Function
    coefficient: float = 1.0
    name: str = ""


class KL(NamedTuple):
    """A KL estimator against the reference policy, and its weight.

    An estimator with the parameter `logprobs` is a term of the loss. Any other estimator is subtracted from the rewards
    of tokens.

    Attributes:
        coefficient: the weight
        threshold: larger values of the KL are cut to this, in nats per token
        target: adapt the coefficient to reach this KL, in nats per token
        horizon: an adapted coefficient changes by up to 0.2 / horizon in a step
    """

    function: Function
    coefficient: float = 0.01
    threshold: float | None = None
    target: float | None = None
    horizon: int = 10


_KL = KL._field_defaults

KL_SETTINGS: tuple[Setting, ...] = (
    Setting("coef", float, _KL["coefficient"], "weight of the KL"),
    Setting("threshold", float | None, _KL["threshold"], "larger values are cut to this, in nats per token"),
    Setting("target", float | None, _KL["target"], "adapt coef to reach this KL, in nats per token"),
    Setting("horizon", int, _KL["horizon"], "with a target: coef changes by up to 0.2 / horizon in a step"),
)
"""The settings of every KL term. Its estimator may have more."""


class Algorithm(NamedTuple):
    """What a backend trains with. Each part is a function or a tuple of functions; None: not used.

    Attributes:
        advantage: of a group, or of the whole batch if it names `batch`
        aggregation: the name of a built-in one, or a function
        terms: their values are added up
        kl: the KL to the reference policy
        correction: weighs tokens that another engine sampled; None: the run chooses
        mix: makes one reward of several, before the advantage
        shaping: change rewards, before the advantage
        select: which rollouts are trained
        pairs: which rollouts are compared
        filters: of groups
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


class Stage(NamedTuple):
    """The `algorithm` from `step` on (0-based), and its name in the backend.

    `correction_auto`: the run added the correction by itself (see `corrections.applied_stages`).
    """

    step: int
    name: str
    algorithm: Algorithm
    correction_auto: bool = False

    def inside(self) -> Stage:
        """The stage for a sampler that is the trainer itself: without a correction that the run chose."""
        return self._replace(algorithm=self.algorithm._replace(correction=None)) if self.correction_auto else self


def as_algorithm(component: Any) -> Algorithm:
    """Return an Algorithm unchanged; make one of a loss function, with the usual advantage and aggregation, and an
    entropy term with coefficient 0.

    A loss with the parameter `pair_index` gets the usual pairs (best and worst of a group). Raises SignatureError for
    anything but an Algorithm or a valid loss function.
    """
    if isinstance(component, Algorithm):
        return component
    if callable(component) and not isinstance(component, type):
        own = signature_of(component, "losses")
        if "pair_index" in own.requests:
            return Algorithm(group_norm, "pair_mean", (Term(component),), pairs=best_worst)
        has_entropy = any(setting.name == "entropy_coef" for setting in own.settings)
        entropy = () if has_entropy else (Term(entropy_bonus, 0.0, "entropy"),)
        return Algorithm(group_norm, "token_mean", (Term(component), *entropy))
    what = "a loss is a function of what it names (`def my_loss(logprobs, advantages)`)"
    raise SignatureError(f"{what}, or an Algorithm of such functions; {function_label(component)} is neither")


def active_terms(algorithm: Algorithm) -> tuple[Term, ...]:
    """The terms whose coefficient is not 0."""
    return tuple(term for term in algorithm.terms if term.coefficient != 0)


def function_label(function: Any) -> str:
    """The name of a function for messages, also if settings are bound by `partial`."""
    if isinstance(function, str):
        return function
    plain = unwrapped(function)
    return str(getattr(plain, "__name__", type(plain).__name__))


# --- settings -------------------------------------------------------------------------------------------------------


def algorithm_settings(algorithm: Algorithm) -> tuple[Setting, ...]:
    """The keyword-only settings of all terms, and the coefficients of named terms. Each name appears once."""
    return read_signature(algorithm, "losses").settings


def bind_algorithm(algorithm: Algorithm, settings: Mapping[str, Any]) -> Algorithm:
    """Bind settings to the terms that have them. The values must already have the right types.

    Raises ConfigError for a setting that no term has.
    """
    refuse_unknown("the loss", settings, [setting.name for setting in algorithm_settings(algorithm)])
    return algorithm._replace(terms=tuple(_bound_term(term, settings) for term in algorithm.terms))


def refuse_unknown(label: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise ConfigError for the first of the `given` settings that `label` does not know."""
    for name in given:
        if name not in known:
            close = near_misses(name, known)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{label} has no setting {name!r}{hint} (settings: {', '.join(sorted(known)) or 'none'})")


def setting_of(algorithm: Algorithm, name: str) -> Any | None:
    """The value of a setting in the first term that has it, bound or default. None if no term has it."""
    signatures = (signature_of(term.function, "losses") for term in active_terms(algorithm))
    return next((each.default for signature in signatures for each in signature.settings if each.name == name), None)


def bind_own(function: Function, kind: str, settings: Mapping[str, Any]) -> Function:
    """Bind the settings that the function has, and ignore all others."""
    own = {setting.name for setting in signature_of(function, kind).settings}
    return bind(function, {name: value for name, value in settings.items() if name in own})


def _bound_term(term: Term, settings: Mapping[str, Any]) -> Term:
    function = bind_own(term.function, "losses", settings)
    coefficient = float(settings.get(f"{term.name}_coef", term.coefficient) if term.name else term.coefficient)
    flag = f"--loss.{term.name.replace('_', '-')}-coef"
    check_setting(f"{term.name}_coef", coefficient, math.isfinite(coefficient), "a finite number", f"{flag} 0.001")
    return Term(function, coefficient, term.name)


# --- what an algorithm needs from a run -----------------------------------------------------------------------------


def signature_of(function: Any, kind: str) -> Signature:
    """The checked signature of a function of this kind, cached. Raises SignatureError."""
    hashable = type(function).__hash__ is not None
    return _signature_once(function, kind) if hashable else check_signature(function, kind, function_label(function))


@functools.lru_cache(maxsize=512)
def _signature_once(function: Function, kind: str) -> Signature:
    return check_signature(function, kind, function_label(function))


def requests(function: Any, kind: str = "losses") -> tuple[str, ...]:
    """The names of a function's inputs, in order. Raises SignatureError for a name outside its kind's vocabulary."""
    return signature_of(function, kind).requests


def is_batch_advantage(function: Callable[..., Any]) -> bool:
    """Whether the advantage is computed once for the whole batch: it names `batch`."""
    return "batch" in requests(function, "advantages")


def is_reward_placed(function: Callable[..., Any]) -> bool:
    """Whether a KL estimator is subtracted from the rewards: it does not name `logprobs`, so it has no gradient."""
    return "logprobs" not in requests(function, "kl")


def needs(algorithm: Algorithm) -> frozenset[str]:
    """The names that terms, KL and correction use. Raises SignatureError."""
    names = {name for term in active_terms(algorithm) for name in requests(term.function)}
    if algorithm.kl is not None:
        names |= set(requests(algorithm.kl.function, "kl"))
    if algorithm.correction is not None:
        names |= set(requests(algorithm.correction, "corrections"))
    return frozenset(names)


def forward_needs(algorithm: Algorithm) -> tuple[str, ...]:
    """What must be computed before the loss: fields of ForwardOutput, sorted."""
    asked = needs(algorithm)
    of_advantage: frozenset[str] = frozenset()
    if is_batch_advantage(algorithm.advantage) and algorithm.pairs is None:
        of_advantage = frozenset(requests(algorithm.advantage, "advantages"))
    wanted = (asked | of_advantage) & {"ref_logprobs", "teacher_logprobs"}
    if asked & {"old_values", "returns"} or "values" in of_advantage:
        wanted |= {"values"}
    return tuple(sorted(wanted))


# --- stages ---------------------------------------------------------------------------------------------------------


def stage_name(step: int) -> str:
    """The name of the stage that begins at this step.

    >>> stage_name(0), stage_name(50)
    ('main', 'from_step_50')
    """
    return f"from_step_{step}" if step else FIRST


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """The stage of `step`: the last one whose first step is not later. `stages` are sorted by first step; the first
    stage begins at 0.
    """
    steps = [stage.step for stage in stages]
    assert steps and steps[0] == 0 and steps == sorted(set(steps)), f"stages begin at {steps}; expected 0, then later"
    assert step >= 0, f"there is no step {step}"
    return next(stage for stage in reversed(stages) if stage.step <= step)
