"""Rewards of rollouts: one number or several, aggregated, normalized and shaped.

A *reward function* takes a Rollout and returns a number, a list of numbers (a vector reward), or None if it cannot
judge. None is never 0: such a rollout has no reward, and nothing is trained on it. Reward functions made from parts are
in utilities.py.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollouts.author_code import shown
from rollouts.errors import ConfigError, RewardError, UnknownComponentError
from rollouts.plugins.index import find_component
from rollouts.plugins.loading import load_component
from rollouts.training.algorithms.advantages import group_norm
from rollouts.training.algorithms.algorithm import function_label
from rollouts.training.algorithms.calls import check_per_rollout
from rollouts_notes.primitives.calls import call_given
from rollouts_notes.primitives.types import Rollout

RewardFn = Callable[[Rollout], Any]
RewardFns = RewardFn | Sequence[RewardFn] | Mapping[str, RewardFn]
Rewards = Sequence[float | None]


def compute_scalar_reward(rollout: Rollout, reward_fn: RewardFn) -> float | None:
    """The reward of one rollout; None if the function cannot judge it.

    Raises RewardError, which names the function, if it raises or returns anything but a finite number or None.

    >>> from rollouts.primitives import Generation
    >>> compute_scalar_reward(Rollout("2 + 3", Generation("5")), lambda rollout: len(rollout.generation.text))
    1.0
    """
    return as_number(_judged(reward_fn, rollout), reward_fn)


def compute_vector_reward(rollout: Rollout, reward_fns: RewardFns) -> list[float | None]:
    """Several rewards of one rollout: of several functions (a list or a dict), or of one that returns a list.

    Raises RewardError like `compute_scalar_reward`, and ConfigError if there is no function.

    >>> from rollouts.primitives import Generation
    >>> compute_vector_reward(Rollout("2 + 3", Generation("5")), [lambda r: r.generation.text == "5", lambda r: -0.1])
    [1.0, -0.1]
    """
    if callable(reward_fns):
        found = _judged(reward_fns, rollout)
        if not is_vector(found):
            raise RewardError(f"{_of(reward_fns)} returned {shown(found)}; expected a list of numbers")
        return [as_number(each, reward_fns) for each in found]
    if isinstance(reward_fns, str) or not isinstance(reward_fns, Sequence | Mapping):
        raise ConfigError(f"the reward function is {shown(reward_fns)}; expected a function of a Rollout, or several")
    functions = list(reward_fns.values() if isinstance(reward_fns, Mapping) else reward_fns)
    if not functions:
        raise ConfigError("there are no reward functions; give at least one")
    return [compute_scalar_reward(rollout, each) for each in functions]


def aggregate_vector_rewards(
    rewards: Rewards,
    *,
    weights: Sequence[float] | None = None,
    aggregator: Callable[[list[float]], float] | None = None,
) -> float | None:
    """One number of a vector reward: the weighted sum (weights of 1 by default), or what `aggregator` returns.

    None if one of the rewards is None. Raises ConfigError for a wrong number of weights, and RewardError if the
    aggregator does not return a finite number.

    >>> aggregate_vector_rewards([1.0, 0.5], weights=[1.0, -0.2])
    0.9
    >>> aggregate_vector_rewards([1.0, 0.5], aggregator=min)
    0.5
    """
    if weights is not None and len(weights) != len(rewards):
        raise ConfigError(f"{len(weights)} weights for {len(rewards)} rewards; give one weight for each")
    known = [each for each in rewards if each is not None]
    if len(known) < len(rewards):
        return None
    weighted = known if weights is None else [w * r for w, r in zip(weights, known, strict=True)]
    if aggregator is None:
        return math.fsum(weighted)
    return as_number(call_given("aggregator(rewards)", aggregator, weighted, error=RewardError), aggregator)


def compute_batch_rewards(
    rollouts: Sequence[Rollout],
    reward_fn: RewardFns,
    *,
    weights: Sequence[float] | None = None,
    aggregator: Callable[[list[float]], float] | None = None,
) -> list[Rollout]:
    """The rollouts [N] with their rewards. A vector reward is aggregated, and kept in `metadata["reward_vector"]`.

    Raises RewardError and ConfigError like the functions above.

    >>> from rollouts.primitives import Generation
    >>> rollouts = [Rollout("2 + 3", Generation(text)) for text in ("5", "It is 5.")]
    >>> [each.rewards for each in compute_batch_rewards(rollouts, lambda r: 1 / len(r.generation.text))]
    [1.0, 0.125]

    Args:
        reward_fn: one function, or a list or dict of functions
    """
    return [_rewarded(each, reward_fn, weights, aggregator) for each in rollouts]


def _rewarded(
    rollout: Rollout,
    reward_fn: RewardFns,
    weights: Sequence[float] | None,
    aggregator: Callable[[list[float]], float] | None,
) -> Rollout:
    found: Any = _judged(reward_fn, rollout) if callable(reward_fn) else compute_vector_reward(rollout, reward_fn)
    if not is_vector(found):
        return rollout._replace(rewards=as_number(found, reward_fn))
    vector = [as_number(each, reward_fn) for each in found]
    value = aggregate_vector_rewards(vector, weights=weights, aggregator=aggregator)
    return rollout._replace(rewards=value, metadata={**rollout.metadata, "reward_vector": vector})


def normalize_rewards(
    rewards: Rewards, *, normalizer: Callable[[list[float]], Sequence[float]] | None = None
) -> list[float | None]:
    """The rewards [N] normalized: (R - mean) / (std + 1e-4), ddof 1 (the engine's `group_norm`), or by `normalizer`.

    None stays None, and is not passed to the normalizer. All are 0 if there is no spread. Raises TrainingError if the
    normalizer does not return one finite number per reward.

    >>> [round(each, 2) for each in normalize_rewards([1.0, 0.0, 0.0])]
    [1.15, -0.58, -0.58]
    >>> normalize_rewards([3.0, None, 1.0], normalizer=lambda rewards: [each / max(rewards) for each in rewards])[0]
    1.0
    """
    known = [float(each) for each in rewards if each is not None]
    function = normalizer or group_norm
    returned = call_given("normalizer(rewards)", function, known, error=RewardError) if known else []
    values = iter(check_per_rollout("normalizer", function, returned, len(known)))
    return [None if each is None else next(values) for each in rewards]


def apply_reward_shaping(rollout: Rollout, *, shaping_fn: Callable[[float, Rollout], float]) -> Rollout:
    """The rollout with the reward `shaping_fn(reward, rollout)`. A rollout without a reward is returned unchanged.

    Each number of a vector reward is shaped. Raises RewardError if the function does not return a finite number.

    >>> from rollouts.primitives import Generation
    >>> rollout = Rollout("2 + 3", Generation("It is 5."), rewards=1.0)
    >>> apply_reward_shaping(rollout, shaping_fn=lambda reward, rollout: reward - len(rollout.generation.text) / 80)[2]
    0.9
    """

    def shape(reward: float | None) -> float | None:
        if reward is None:
            return None
        shaped = call_given("shaping_fn(reward, rollout)", shaping_fn, reward, rollout, error=RewardError)
        return as_number(shaped, shaping_fn)

    rewards = rollout.rewards
    if isinstance(rewards, Sequence):
        return rollout._replace(rewards=[shape(each) for each in rewards])
    return rollout._replace(rewards=shape(rewards))


# --- reward models ----------------------------------------------------------------------------------------------------


def load_reward_model(name: str, *, model_loader: Callable[[str], Any] | None = None) -> Any:
    """Load a reward model with `model_loader(name)`; None: with the one of the package rollouts-reward-model.

    Raises ConfigError without a loader and without the package, and what the loader raises.

    >>> load_reward_model("a/judge", model_loader=lambda name: f"the model {name}")
    'the model a/judge'
    """
    return (model_loader or _of_package("load_reward_model", "model_loader=my_loader"))(name)


def compute_reward_model_score(
    reward_model: Any, rollout: Rollout, *, scorer: Callable[[Any, Rollout], float] | None = None
) -> float | None:
    """The score `scorer(reward_model, rollout)`; None: with the scorer of the package rollouts-reward-model.

    Raises ConfigError without a scorer and without the package, and RewardError if the scorer does not return a finite
    number or None.

    >>> from rollouts.primitives import Generation
    >>> judge = {"5": 1.0}
    >>> compute_reward_model_score(judge, Rollout("2 + 3", Generation("5")), scorer=lambda m, r: m[r.generation.text])
    1.0
    """
    scorer = scorer or _of_package("compute_reward_model_score", "scorer=my_scorer")
    score = call_given("scorer(reward_model, rollout)", scorer, reward_model, rollout, error=RewardError)
    return as_number(score, scorer)


def _of_package(name: str, argument: str) -> Callable[..., Any]:
    """The function of the package that has the reward `reward_model`. Raises ConfigError."""
    try:
        component = load_component(find_component("rewards", "reward_model"))
    except UnknownComponentError as error:
        own = f"type: pip install rollouts-reward-model\nor give your own: {name}(..., {argument})"
        raise ConfigError(
            f"{name}: reward models are in a package of their own, which is not installed\n{own}"
        ) from error
    found: Callable[..., Any] = getattr(importlib.import_module(component.__module__), name)
    return found


# --- values -----------------------------------------------------------------------------------------------------------


def _judged(reward_fn: RewardFn, rollout: Rollout) -> Any:
    return call_given("reward_fn(rollout)", reward_fn, rollout, error=RewardError)


def is_vector(found: Any) -> bool:
    """Whether a reward is a vector: a list, a tuple, or an array with an axis."""
    return isinstance(found, list | tuple) or len(getattr(found, "shape", ())) == 1


def as_number(found: Any, function: Any) -> float | None:
    """The number, which may be a bool or an array of one. Raises RewardError for anything else, NaN and infinities."""
    if found is None:
        return None
    try:
        value = math.nan if isinstance(found, str | bytes) else float(found)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not math.isfinite(value):
        verb = "has the reward" if isinstance(function, str) else "returned"
        raise RewardError(f"{_of(function)} {verb} {shown(found)}; expected a finite number, or None")
    return value


def _of(function: Any) -> str:
    if isinstance(function, str):
        return function
    return f"the function {function_label(function)}" if callable(function) else "a reward function"
