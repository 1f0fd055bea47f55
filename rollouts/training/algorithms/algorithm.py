"""An algorithm is a composition of small pure functions in a NamedTuple; nothing is inherited from anything.

Here are the shapes (`Term`, `KL`, `Algorithm`), the functions that put one together and bind its settings, what it asks
of a run (read from the names of its functions' parameters), and which algorithm of several is in force at a step. What
it computes is in evaluate.py, what a run refuses in checks.py, what the terms mean in losses.py. No torch.
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
"""The name of the stage that a run begins with."""


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


class Stage(NamedTuple):
    """The `algorithm` that is in force from `step` on (0-based), and its name with the backend.

    `correction_auto`: its off-policy correction was not asked for, so it is for tokens of other engines or weights.
    """

    step: int
    name: str
    algorithm: Algorithm
    correction_auto: bool = False

    def inside(self) -> Stage:
        """The stage for a sampler that is the trainer itself: no correction, unless one was asked for."""
        return self._replace(algorithm=self.algorithm._replace(correction=None)) if self.correction_auto else self


def as_algorithm(component: Any) -> Algorithm:
    """An Algorithm as it is; a bare loss function with the usual advantage, aggregation and an entropy term (0).

    A loss that names `pair_index` gets the usual pairs (best and worst of a group). Raises SignatureError.
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
    raise SignatureError(
        f"a loss is a function of what it names (`def my_loss(logprobs, advantages)`) or an Algorithm of such "
        f"functions, but {component!r} is neither"
    )


def active_terms(algorithm: Algorithm) -> tuple[Term, ...]:
    """The terms that count: those without a coefficient of 0."""
    return tuple(term for term in algorithm.terms if term.coefficient != 0)


def function_label(function: Any) -> str:
    """The name of a function in messages; settings bound by `partial` do not hide it."""
    if isinstance(function, str):
        return function
    plain = unwrapped(function)
    return str(getattr(plain, "__name__", type(plain).__name__))


# --- settings -------------------------------------------------------------------------------------------------------


def algorithm_settings(algorithm: Algorithm) -> tuple[Setting, ...]:
    """The keyword-only settings of all terms, each name once, and the coefficients of the terms that have a name."""
    return read_signature(algorithm, "losses").settings


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
    settings = (
        setting for term in active_terms(algorithm) for setting in signature_of(term.function, "losses").settings
    )
    return next((setting.default for setting in settings if setting.name == name), None)


def bind_own(function: Function, kind: str, settings: Mapping[str, Any]) -> Function:
    """The function with those of the settings bound that it has."""
    own = {setting.name for setting in signature_of(function, kind).settings}
    return bind(function, {name: value for name, value in settings.items() if name in own})


def _bound_term(term: Term, settings: Mapping[str, Any]) -> Term:
    function = bind_own(term.function, "losses", settings)
    coefficient = float(settings.get(f"{term.name}_coef", term.coefficient) if term.name else term.coefficient)
    flag = f"--loss.{term.name.replace('_', '-')}-coef"
    check_setting(f"{term.name}_coef", coefficient, math.isfinite(coefficient), "a finite number", f"{flag} 0.001")
    return Term(function, coefficient, term.name)


# --- what it asks of a run ------------------------------------------------------------------------------------------


def signature_of(function: Any, kind: str) -> Signature:
    """The checked signature of a function of this kind, read once. Raises SignatureError."""
    hashable = type(function).__hash__ is not None
    return _signature_once(function, kind) if hashable else check_signature(function, kind, function_label(function))


@functools.lru_cache(maxsize=512)
def _signature_once(function: Function, kind: str) -> Signature:
    return check_signature(function, kind, function_label(function))


def requests(function: Any, kind: str = "losses") -> tuple[str, ...]:
    """The names that a function asks for, in order. Raises SignatureError for one outside its kind's vocabulary."""
    return signature_of(function, kind).requests


def is_batch_advantage(function: Callable[..., Any]) -> bool:
    """Whether the advantage is called once for the whole batch: it names `batch`."""
    return "batch" in requests(function, "advantages")


def is_reward_placed(function: Callable[..., Any]) -> bool:
    """Whether a KL estimator is taken off the rewards: it carries no gradient, for it does not name `logprobs`."""
    return "logprobs" not in requests(function, "kl")


def needs(algorithm: Algorithm) -> frozenset[str]:
    """The names that the loss asks for: its terms, its KL, its correction. Raises SignatureError."""
    names = {name for term in active_terms(algorithm) for name in requests(term.function)}
    if algorithm.kl is not None:
        names |= set(requests(algorithm.kl.function, "kl"))
    if algorithm.correction is not None:
        names |= set(requests(algorithm.correction, "corrections"))
    return frozenset(names)


def forward_needs(algorithm: Algorithm) -> tuple[str, ...]:
    """What has to be computed for the batch before its loss: fields of ForwardOutput, sorted."""
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
    """The stage in force at `step`: the last one that has begun. `stages` are sorted, and the first begins at 0."""
    steps = [stage.step for stage in stages]
    assert steps and steps[0] == 0 and steps == sorted(set(steps)), f"stages begin at {steps}; they start at 0, sorted"
    assert step >= 0, f"there is no step {step}"
    return next(stage for stage in reversed(stages) if stage.step <= step)
