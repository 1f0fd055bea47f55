"""What an algorithm asks of a run, read from the names of its functions' parameters; and what a run can give.

Everything here is checked before any model loads. No torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from rollouts.errors import ConfigError, SignatureError
from rollouts.plugins.signature import Signature, check_signature
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, function_label, unwrapped

__all__ = [
    "GROUP_ADVANTAGE_AVAILABLE",
    "available_names",
    "check_advantage",
    "check_composition",
    "check_needs",
    "forward_needs",
    "is_batch_advantage",
    "is_reward_placed",
    "needs",
    "requests",
    "signature_of",
]

_ALWAYS = frozenset(
    {
        "advantages",
        "entropy",
        "group_index",
        "logits",
        "logprobs",
        "mask",
        "old_logprobs",
        "rewards",
        "rollout_index",
        "rollout_logprobs",
        "segments",
        "step",
    }
)
_CRITIC = frozenset({"old_values", "returns", "values"})
_TEACHER = frozenset({"teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs", "topk_logprobs"})

# What an advantage of one group may name in this version: no environment gives rewards by turn yet.
GROUP_ADVANTAGE_AVAILABLE: frozenset[str] = frozenset({"lengths", "rewards"})

_REASONS = {
    **dict.fromkeys(_CRITIC, "this run has no critic; type --critic head (or a model's name)"),
    **dict.fromkeys(_TEACHER, "this run has no teacher; type --teacher with a model's name or folder"),
    "pair_index": "this run makes no pairs of rollouts; type --pairs best_worst --aggregation pair_mean",
    "ref_logprobs": "this run has no reference policy",
}


def available_names(
    *, critic: bool = False, teacher: bool = False, pairs: bool = False, reference: bool = True
) -> frozenset[str]:
    """What a loss may name in a run that has these."""
    names = set(_ALWAYS)
    names |= _CRITIC if critic else set()
    names |= _TEACHER if teacher else set()
    names |= {"pair_index"} if pairs else set()
    names |= {"ref_logprobs"} if reference else set()
    return frozenset(names)


def signature_of(function: Any, kind: str) -> Signature:
    """The checked signature of a function of this kind, read once. Raises SignatureError."""
    inner = unwrapped(function)
    if type(inner).__hash__ is None:
        return check_signature(inner, kind, f"{function_label(inner)}")
    return _signature_once(inner, kind)


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


def check_needs(algorithm: Algorithm, available: Collection[str]) -> None:
    """Refuse, before any model loads, a part of the loss that names what this run cannot give. Raises
    SignatureError.
    """
    parts = [(term.function, "losses", "loss") for term in active_terms(algorithm)]
    parts += [(algorithm.kl.function, "kl", "KL estimator")] if algorithm.kl is not None else []
    for function, kind, word in parts:
        for name in requests(function, kind):
            if name in available:
                continue
            reason = _REASONS.get(name, f"this run does not offer `{name}`")
            raise SignatureError(
                f"the {word} {function_label(function)} names `{name}`, but {reason}; it may name here: "
                f"{', '.join(sorted(available))}"
            )


def check_advantage(function: Callable[..., Any], available: Collection[str] = ()) -> None:
    """Refuse an advantage that names what this run cannot give; `available` are the loss's names. Raises
    SignatureError.
    """
    label = function_label(function)
    asked = requests(function, "advantages")
    if "batch" not in asked:
        for name in asked:
            if name not in GROUP_ADVANTAGE_AVAILABLE:
                raise SignatureError(
                    f"the advantage {label} names `{name}`, but this run offers a group's "
                    f"{' and '.join(f'`{each}`' for each in sorted(GROUP_ADVANTAGE_AVAILABLE))} only"
                )
        return
    for name in asked:
        if name in _REASONS and name not in available:
            raise SignatureError(f"the advantage {label} names `{name}`, but {_REASONS[name]}")


def check_composition(algorithm: Algorithm, samples_per_prompt: int | None = None) -> None:
    """Refuse parts that do not go together. Raises ConfigError.

    `samples_per_prompt` None leaves out what depends on the size of a group.
    """
    aggregation = function_label(algorithm.aggregation)
    if not active_terms(algorithm):
        flags = ", ".join(f"--loss.{term.name.replace('_', '-')}-coef" for term in algorithm.terms)
        raise ConfigError(f"every term of the loss counts 0, so there is nothing to train on; raise one of {flags}")
    if algorithm.select is not None and is_batch_advantage(algorithm.advantage):
        raise ConfigError(
            f"--select {function_label(algorithm.select)}: the advantage {function_label(algorithm.advantage)} is "
            "estimated on what is trained, so it would see only what was selected; type --advantage group_norm"
        )
    of_pairs = [term for term in active_terms(algorithm) if "pair_index" in requests(term.function)]
    if algorithm.pairs is not None:
        label = function_label(algorithm.pairs)
        if algorithm.select is not None:
            raise ConfigError(f"--pairs {label} and --select {function_label(algorithm.select)}: choose one of them")
        for term in active_terms(algorithm):
            if term not in of_pairs:
                raise ConfigError(
                    f"--pairs {label}: the loss {function_label(term.function)} does not name `pair_index`, so it "
                    "cannot compare pairs; type --loss dpo, or leave --pairs out"
                )
        if samples_per_prompt is not None and samples_per_prompt < 2:
            raise ConfigError(
                f"--samples-per-prompt {samples_per_prompt}: --pairs {label} compares rollouts of one prompt, which "
                "takes 2 or more of them"
            )
        if algorithm.kl is not None:
            raise ConfigError(
                f"--kl {function_label(algorithm.kl.function)}: a KL term has one value a token, and the pairs of "
                f"--loss {function_label(of_pairs[0].function)} are aggregated one by one; leave --kl out"
            )
    kl = algorithm.kl
    if kl is not None and aggregation == "per_rollout":
        raise ConfigError(
            f"--kl {function_label(kl.function)}: a KL term has one value a token, and per_rollout takes one a "
            "rollout; type --aggregation rollout_mean, or leave --kl out"
        )
    names = {name for term in active_terms(algorithm) for name in requests(term.function)}
    if kl is not None and is_reward_placed(kl.function) and "advantages" not in names:
        raise ConfigError(
            f"--kl {function_label(kl.function)} is taken off the advantages, and the loss "
            f"{' + '.join(function_label(term.function) for term in active_terms(algorithm))} does not name them; "
            "type --kl rk3_loss"
        )
    if (aggregation == "pair_mean") != (algorithm.pairs is not None):
        raise ConfigError(
            f"--aggregation {aggregation}: "
            + ("pairs need pair_mean" if algorithm.pairs is not None else "there are no pairs; type --pairs best_worst")
        )
    if "pair_index" in needs(algorithm) and algorithm.pairs is None:
        raise ConfigError(f"the loss {function_label(of_pairs[0].function)} compares pairs; type --pairs best_worst")


@functools.lru_cache(maxsize=512)
def _signature_once(inner: Callable[..., Any], kind: str) -> Signature:
    return check_signature(inner, kind, function_label(inner))
