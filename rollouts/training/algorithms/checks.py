"""Checks before a model loads: parts that need what the run does not have, that do not fit together, or that have an
invalid setting. Imports torch only to try out settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType
from typing import Any

from rollouts.author_code import unwrapped
from rollouts.errors import ConfigError, RolloutsError, SignatureError, TrainingError, UserError, words_of
from rollouts.plugins.signature import call_with
from rollouts.plugins.vocabulary import VOCABULARY
from rollouts.training.algorithms import calls
from rollouts.training.algorithms.aggregation import aggregation_function
from rollouts.training.algorithms.algorithm import (
    Algorithm,
    Term,
    active_terms,
    function_label,
    is_batch_advantage,
    is_reward_placed,
    needs,
    requests,
)
from rollouts.training.algorithms.objective import check_loss_values

CRITIC_NAMES = frozenset({"old_values", "returns", "values"})
TEACHER_NAMES = frozenset({"teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs", "topk_logprobs"})

# Names for an advantage of one group.
GROUP_ADVANTAGE_AVAILABLE: frozenset[str] = frozenset({"lengths", "rewards", "turn_rewards"})

ONE_SAMPLE = "one sample per prompt has nothing to compare with; type --samples-per-prompt 8"

_REASONS = {
    **dict.fromkeys(CRITIC_NAMES, "this run has no critic; type --critic head (or a model's name)"),
    **dict.fromkeys(TEACHER_NAMES, "this run has no teacher; type --teacher with a model's name or folder"),
    "pair_index": "this run makes no pairs of rollouts; type --pairs best_worst --aggregation pair_mean",
    "ref_logprobs": "this run has no reference policy",
}


def available_names(
    *, critic: bool = False, teacher: bool = False, pairs: bool = False, reference: bool = True
) -> frozenset[str]:
    """The names that a loss may use in a run with these models."""
    given = (critic, CRITIC_NAMES), (teacher, TEACHER_NAMES), (pairs, {"pair_index"}), (reference, {"ref_logprobs"})
    return frozenset(VOCABULARY["losses"]).difference(*(names for has, names in given if not has))


def check_needs(algorithm: Algorithm, available: Collection[str]) -> None:
    """Raise SignatureError if a part of the loss names something that this run does not have."""
    parts = [(term.function, "losses", "loss") for term in active_terms(algorithm)]
    parts += [(algorithm.kl.function, "kl", "KL estimator")] if algorithm.kl is not None else []
    for function, kind, word in parts:
        for name in requests(function, kind):
            if name not in available:
                reason, known = _REASONS.get(name, f"this run does not offer `{name}`"), ", ".join(sorted(available))
                raise _refused(word, function, name, f"{reason}; it may name here: {known}")


def check_advantage(function: Callable[..., Any], available: Collection[str] = ()) -> None:
    """Raise SignatureError if the advantage names what this run does not have. `available` are the loss's names."""
    asked = requests(function, "advantages")
    for name in asked:
        if "batch" not in asked and name not in GROUP_ADVANTAGE_AVAILABLE:
            known = " and ".join(f"`{each}`" for each in sorted(GROUP_ADVANTAGE_AVAILABLE))
            raise _refused("advantage", function, name, f"this run offers a group's {known} only")
        if "batch" in asked and name in _REASONS and name not in available:
            raise _refused("advantage", function, name, _REASONS[name])


def _refused(word: str, function: Callable[..., Any], name: str, reason: str) -> SignatureError:
    return SignatureError(f"the {word} {function_label(function)} names `{name}`, but {reason}")


def check_composition(algorithm: Algorithm, samples_per_prompt: int | None = None) -> None:
    """Raise ConfigError if parts do not fit together.

    `samples_per_prompt` None skips checks that depend on the size of a group.
    """
    terms, select = active_terms(algorithm), algorithm.select
    if not terms:
        flags = ", ".join(f"--loss.{term.name.replace('_', '-')}-coef" for term in algorithm.terms)
        raise ConfigError(f"every term of the loss has coefficient 0, so nothing is trained; increase one of {flags}")
    if select is not None and is_batch_advantage(algorithm.advantage):
        reason = "is computed on trained rollouts, so it would only see selected ones; type --advantage group_norm"
        label = function_label(algorithm.advantage)
        raise ConfigError(f"--select {function_label(select)}: the advantage {label} {reason}")
    if algorithm.pairs is not None:
        _check_pairs(algorithm, algorithm.pairs, samples_per_prompt)
    unit, aggregation = unit_of(algorithm), function_label(algorithm.aggregation)
    if (unit == "pair") != (algorithm.pairs is not None):
        reason = "there are no pairs; type --pairs best_worst" if unit == "pair" else "pairs need pair_mean"
        raise ConfigError(f"--aggregation {aggregation}: {reason}")
    if algorithm.kl is not None:
        _check_kl(algorithm.kl.function, terms, unit, aggregation)
    for term in terms:
        if algorithm.pairs is None and "pair_index" in requests(term.function):
            raise ConfigError(f"the loss {function_label(term.function)} compares pairs; type --pairs best_worst")


def compares_groups(algorithm: Algorithm) -> bool:
    """Whether the advantage compares the rollouts of a group, so that the advantage of a group's only rollout is 0,
    whatever its reward is.
    """
    if algorithm.pairs is not None or is_batch_advantage(algorithm.advantage) or "advantages" not in needs(algorithm):
        return False
    if not isinstance(unwrapped(algorithm.advantage), FunctionType):  # a call may change an object's state
        return False
    try:
        found = [calls.group_advantages(algorithm.advantage, [reward], lengths=[1]) for reward in (0.0, 0.3, 1.0)]
        return found == [[0.0]] * 3
    except RolloutsError:  # the first batch reports the error
        return False


def is_weighed(algorithm: Algorithm) -> bool:
    """Whether a correction has an effect: a term with one value per token is a mean over sampled tokens."""
    if algorithm.pairs is not None or unit_of(algorithm) == "rollout":
        return False
    return any({"advantages", "old_logprobs"} & set(requests(term.function)) for term in active_terms(algorithm))


def keeps_own_tokens(correction: Any) -> bool:
    """Whether a correction of rollouts gives the weight 1 to every token that the trainer's own policy sampled. False
    for one that names `step`, and for an author's, which may keep a state.
    """
    plain = unwrapped(correction)
    is_ours = isinstance(plain, FunctionType) and plain.__module__.startswith("rollouts.")
    if not is_ours or "step" in requests(correction, "corrections"):
        return False
    with contextlib.suppress(ModuleNotFoundError):  # without torch, nothing is tried
        weights = _probe(correction, _three_tokens(None))
        return weights is not _NO_ANSWER and bool((weights == 1).all())
    return False


def drops_groups_of_one(function: Any, settings: Mapping[str, Any]) -> bool:
    """Whether a filter of the core drops every group of one rollout, whatever its reward is. False if this cannot be
    known.
    """
    rewards = [*(place / 20 for place in range(21)), *(sign * size for sign in (-1, 1) for size in (0.5, 2, 5, 1e6))]
    groups = [{"rewards": [reward], "scores": [reward], "parts": [{}]} for reward in rewards]
    plain = unwrapped(function)
    is_ours = isinstance(plain, FunctionType) and plain.__module__.startswith("rollouts.")
    if not is_ours or not set(requests(function, "filters")) <= groups[0].keys():
        return False
    return not any(call_with(function, group, settings) is True for group in groups)


def _check_pairs(algorithm: Algorithm, pairs: Callable[..., Any], samples_per_prompt: int | None) -> None:
    flag, size = f"--pairs {function_label(pairs)}", samples_per_prompt
    if algorithm.select is not None:
        raise ConfigError(f"{flag} and --select {function_label(algorithm.select)}: choose one of them")
    for term in active_terms(algorithm):
        if "pair_index" not in requests(term.function):
            reason = f"the loss {function_label(term.function)} does not name `pair_index`, so it cannot compare pairs"
            raise ConfigError(f"{flag}: {reason}; type --loss dpo, or leave --pairs out")
    if size is not None and size < 2:
        reason = "compares rollouts of one prompt, so it needs 2 or more of them"
        raise ConfigError(f"--samples-per-prompt {size}: {flag} {reason}")


def _check_kl(function: Callable[..., Any], terms: Sequence[Term], unit: str, aggregation: str) -> None:
    flag = f"--kl {function_label(function)}"
    if unit != "token":
        other = "leave" if unit == "pair" else "type --aggregation rollout_mean, or leave"
        reason = f"a KL term has one value per token, and {aggregation} takes one per {unit}"
        raise ConfigError(f"{flag}: {reason}; {other} --kl out")
    if is_reward_placed(function) and not any("advantages" in requests(term.function) for term in terms):
        names = " + ".join(function_label(term.function) for term in terms)
        reason = f"is subtracted from the advantages, and the loss {names} does not name them"
        raise ConfigError(f"{flag} {reason}; type --kl rk3_loss")


def unit_of(algorithm: Algorithm) -> str:
    """What a loss returns one value for (token, rollout or pair), as the aggregation says for two invented rows."""
    return str(getattr(_probe(aggregation_function(algorithm.aggregation), _two_rows(8)), "unit", "token"))


def probe_settings(
    algorithm: Algorithm, reference: Callable[..., Any] | None = None, max_tokens: int | None = None
) -> None:
    """Call every function of the algorithm once, with three invented tokens of two rollouts.

    Raises ConfigError if a function refuses one of its settings, if a loss, a KL estimator or an advantage returns a
    wrong shape, or if a name in a function does not exist. Ignores all other errors: the first batch reports them,
    because a function may not accept invented numbers. Callable objects are skipped, because they may have a state.

    `max_tokens` is the run's.
    """
    parts = (algorithm.correction, algorithm.mix, algorithm.select, algorithm.pairs, reference)
    for function in (*algorithm.shaping, *(part for part in parts if part is not None)):
        _probe(function, _three_tokens(max_tokens))
    _probe(aggregation_function(algorithm.aggregation), _two_rows(max_tokens))
    tokens = _three_tokens(max_tokens)
    returned = _probe(algorithm.advantage, tokens)
    is_batch = is_batch_advantage(algorithm.advantage)
    if returned is not _NO_ANSWER and not is_batch:
        _as_config_error(calls.check_advantages, algorithm.advantage, returned, tokens["turn_rewards"])
    unit, units = unit_of(algorithm), {"token": 3, "rollout": 2, "pair": 1}
    functions = [("loss", term.function) for term in active_terms(algorithm)]
    for word, function in [*functions, *([] if algorithm.kl is None else [("KL estimator", algorithm.kl.function)])]:
        returned = _probe(function, tokens)
        if returned is _NO_ANSWER:
            continue
        values = returned[0] if isinstance(returned, tuple) and returned else returned
        gives = next((name for name, count in units.items() if getattr(values, "shape", ()) == (count,)), unit)
        if gives != unit:
            takes = f"--aggregation {function_label(algorithm.aggregation)} takes one value per {unit}"
            other = f"type --aggregation {'pair_mean' if gives == 'pair' else 'token_mean'}"
            raise ConfigError(f"{takes}, and the {word} {function_label(function)} gives one per {gives}; {other}")
        _as_config_error(check_loss_values, word, values, function, unit, units[unit])


_NO_ANSWER = object()


def _as_config_error(check: Callable[..., object], *arguments: Any) -> None:
    """Run a check that training steps use too. Raises ConfigError instead of TrainingError."""
    try:
        check(*arguments)
    except TrainingError as error:
        raise ConfigError(str(error)) from error


def _probe(function: Callable[..., Any], available: dict[str, Any]) -> Any:
    """What a function returns for invented numbers. _NO_ANSWER if it is not a plain function, or if it raises. Raises
    UserError if the function refuses its settings, that is, if it accepts the same numbers without them.
    """
    plain = unwrapped(function)
    if not isinstance(plain, FunctionType):
        return _NO_ANSWER
    try:
        return call_with(function, available)
    except UserError:
        if not _refuses(plain, available):
            raise
    except NameError as error:
        if isinstance(error, UnboundLocalError):  # it may depend on the numbers
            return _NO_ANSWER
        raise ConfigError(f"the function {function_label(function)} raised {words_of(error)}") from error
    except Exception:  # an author's function may raise anything
        return _NO_ANSWER
    return _NO_ANSWER


def _refuses(function: Callable[..., Any], available: dict[str, Any]) -> bool:
    try:
        call_with(function, available)
    except Exception as error:  # a TypeError if a required setting is missing
        return isinstance(error, UserError)
    return False


def _two_rows(max_tokens: int | None) -> dict[str, Any]:
    """A value for each name of an aggregation's vocabulary."""
    rows = {"masks": [[0.0, 1.0, 1.0], [0.0, 1.0]], "rollout_index": [0, 1], "max_tokens": max_tokens}
    return rows | {"group_index": [0, 0], "pair_index": [0, 0]}


def _three_tokens(max_tokens: int | None) -> dict[str, Any]:
    """A value for each name of all other kinds of functions in an algorithm."""
    import torch

    halves = torch.tensor([-0.5, -0.7, -0.9], dtype=torch.float64)
    zeros = torch.zeros(3, dtype=torch.int64)
    streams = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs")
    more = ("entropy", "values", "old_values", "returns", "token_rewards")
    alternatives = torch.tensor([[-0.5, -1.5], [-0.7, -1.2], [-0.6, -1.3]], dtype=torch.float64)
    return {
        **dict.fromkeys((*streams, *more), halves),
        **dict.fromkeys(("topk_logprobs", "teacher_topk_logprobs", "logits"), alternatives),
        **dict.fromkeys(("group_index", "pair_index", "segments"), zeros),
        **{name: [torch.zeros(1)] for name in ("reference", "policy", "adapters")},
        "rollout_index": torch.tensor([0, 0, 1]),
        "turn_index": torch.tensor([0, 1, 0]),
        "teacher_topk_ids": torch.tensor([[0, 0], [0, 0], [1, 1]]),
        "advantages": torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64),
        "rewards": torch.tensor([1.0, 0.0], dtype=torch.float64),
        "mask": torch.ones(3, dtype=torch.float64),
        "lengths": torch.tensor([2, 1]),
        "truncated": torch.tensor([False, False]),
        "turn_rewards": [[0.5, 0.5], [0.0]],
        "parts": torch.tensor([[1.0, 0.5], [0.0, 0.5]], dtype=torch.float64),
        "weights": torch.ones(2, dtype=torch.float64),
        "max_tokens": max_tokens,
        "batch": None,
        "step": 0,
        "version": 1,
    }
