"""The careful callers of an author's functions: what is handed over, and what has to come back.

    group_advantages, mixed_rewards, shaped_rewards, selected, paired    of one group
    batch_advantages                                                     of the whole batch

No author has to think of rollouts that were not judged: they are left out before the call and put back after it.
Whatever the function raises, and whatever it returns that is no result, becomes a TrainingError that names it.

Legend: G rollouts of a group, J of them handed over, T tokens of a batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollouts.author_code import authors_code, shown
from rollouts.errors import RolloutsError, TrainingError, words_of
from rollouts.plugins.signature import call_with
from rollouts.training.algorithms.algorithm import function_label

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[..., Any]
Rewards = Sequence[float | None]


def call_author(word: str, function: Function, available: Mapping[str, Any]) -> Any:
    """What the function returns when it is called with what it names; `word` is what it is ("advantage"). Raises
    TrainingError for whatever it raises.
    """
    try:
        return call_with(function, available)
    except RolloutsError:
        raise
    except Exception as error:  # the author's code may raise anything
        raise TrainingError(f"the {word} {function_label(function)} raised {words_of(error)}") from error


def wrong_result(word: str, function: Function, given: str, expected: str, but: str = "") -> TrainingError:
    """The error that says what a function returned, and what it has to return."""
    return TrainingError(f"the {word} {function_label(function)} {but}returned {given}; it has to return {expected}")


def per_rollout(word: str, function: Function, available: Mapping[str, Any], count: int) -> list[float]:
    """The `count` finite numbers, one a rollout, that the function returns. Raises TrainingError, naming it."""
    return check_per_rollout(word, function, call_author(word, function, available), count)


def check_per_rollout(word: str, function: Function, returned: Any, count: int) -> list[float]:
    """The `count` finite numbers that a function returned. Raises TrainingError, naming it, for anything else."""
    values = _as_tensor(returned)
    if values is None or tuple(values.shape) != (count,) or not bool(values.isfinite().all()):
        raise _wrong(word, function, count, _shown(returned), f"{count} finite numbers, one a rollout")
    return [float(value) for value in values.tolist()]


# --- of one group ---------------------------------------------------------------------------------------------------


def group_advantages(
    function: Function,
    rewards: Rewards,
    *,
    lengths: Sequence[int] | None = None,
    turn_rewards: Sequence[Any] | None = None,
) -> list[float]:
    """The advantages [G] that any per-group function gives the judged rollouts of a group; the others get 0.0.

    The function is handed `rewards` [J] (float64) and, where it names them, `lengths` [J] and `turn_rewards`. Raises
    TrainingError where it does not return J finite numbers.
    """
    judged = _judged(rewards)
    available = _of_group(rewards, judged, lengths)
    if turn_rewards is not None:
        available["turn_rewards"] = [turn_rewards[index] for index in judged]
    advantages = _at_places("advantage", function, available, judged, len(rewards))
    return [0.0 if advantage is None else advantage for advantage in advantages]


def mixed_rewards(
    function: Function,
    parts: Sequence[Mapping[str, float | None] | None],
    weights: Mapping[str, float],
    *,
    step: int = 0,
) -> list[float | None]:
    """The rewards [G] that a mixer makes of the parts of judged rollouts; the others, whose parts are None, stay None.

    The order of the rewards is that of `weights`; parts that it does not name are only logged. A part that could not be
    judged in a rollout that counts all the same (--on-invalid-reward zero) is 0. Raises TrainingError.
    """
    judged = [index for index, part in enumerate(parts) if part is not None]
    if judged and not weights:
        raise TrainingError(
            f"the reward mixer {function_label(function)} has no rewards to mix; type --reward with one or more"
        )
    rows = [[float(part.get(name) or 0.0) for name in weights] for part in parts if part is not None]
    available = {"parts": _tensor(rows), "weights": _tensor(list(weights.values())), "step": step}
    return _at_places("reward mixer", function, available, judged, len(parts))


def shaped_rewards(
    function: Function,
    rewards: Rewards,
    *,
    lengths: Sequence[int],
    truncated: Sequence[bool],
    max_tokens: int | None,
    step: int = 0,
) -> list[float | None]:
    """The rewards [G] after a shaping; what was not judged stays None. Truncated rollouts are shaped too: they are in
    the baseline. Raises TrainingError.
    """
    judged = _judged(rewards)
    available = _of_group(rewards, judged, lengths) | {"max_tokens": max_tokens, "step": step}
    available["truncated"] = _tensor([bool(truncated[index]) for index in judged], "bool")
    return _at_places("reward shaping", function, available, judged, len(rewards))


def selected(
    function: Function, rewards: Rewards, eligible: Sequence[bool], *, lengths: Sequence[int], step: int = 0
) -> list[bool]:
    """Which rollouts of the group [G] are trained on; only eligible ones are handed over, the others are not.

    Raises TrainingError where the function does not return a bool a rollout.
    """
    handed = _eligible(rewards, eligible)
    kept = [False] * len(rewards)
    if not handed:
        return kept
    returned = call_author("rollout selector", function, _of_group(rewards, handed, lengths) | {"step": step})
    values = _as_tensor(returned)
    if values is None or str(values.dtype) != "torch.bool" or tuple(values.shape) != (len(handed),):
        expected = f"{len(handed)} bools, one a rollout (such as `rewards >= 1.0`)"
        raise _wrong("rollout selector", function, len(handed), _shown(returned), expected)
    for index, keep in zip(handed, values.tolist(), strict=True):
        kept[index] = keep
    return kept


def paired(
    function: Function, rewards: Rewards, eligible: Sequence[bool], *, lengths: Sequence[int], step: int = 0
) -> list[tuple[int, int]]:
    """The (chosen, rejected) rollouts, as positions in the whole group; only eligible ones are handed over.

    Raises TrainingError for what is no pair of two different positions of those that were handed over.
    """
    handed = _eligible(rewards, eligible)
    count = len(handed)
    if not handed:
        return []
    returned = call_author("pair selector", function, _of_group(rewards, handed, lengths) | {"step": step})
    expected = f"a list of (chosen, rejected), two different positions from 0 to {count - 1}"
    try:
        pairs = [(operator.index(chosen), operator.index(rejected)) for chosen, rejected in returned]
    except (TypeError, ValueError) as error:
        raise _wrong("pair selector", function, count, _shown(returned), expected) from error
    for pair in pairs:
        if min(pair) < 0 or max(pair) >= count or pair[0] == pair[1]:
            raise _wrong("pair selector", function, count, f"the pair {pair}", expected)
    return [(handed[chosen], handed[rejected]) for chosen, rejected in pairs]


def _wrong(word: str, function: Function, count: int, given: str, expected: str) -> TrainingError:
    return wrong_result(word, function, given, expected, f"got {count} rewards and ")


def _judged(rewards: Rewards) -> list[int]:
    return [index for index, reward in enumerate(rewards) if reward is not None]


def _eligible(rewards: Rewards, eligible: Sequence[bool]) -> list[int]:
    chosen = [index for index, may in enumerate(eligible) if may]
    for index in chosen:
        assert rewards[index] is not None, f"rollout {index} may be trained on, but was not judged: {list(rewards)}"
    return chosen


def _of_group(rewards: Rewards, handed: Sequence[int], lengths: Sequence[int] | None) -> dict[str, Any]:
    available: dict[str, Any] = {"rewards": _tensor([rewards[index] for index in handed])}
    if lengths is not None:
        available["lengths"] = _tensor([lengths[index] for index in handed], "int64")
    return available


def _tensor(values: list[Any], dtype: str = "float64") -> Tensor:
    import torch

    return torch.tensor(values, dtype=getattr(torch, dtype))


def _at_places(
    word: str, function: Function, available: Mapping[str, Any], places: Sequence[int], count: int
) -> list[float | None]:
    """The numbers that the function returns, at their places of `count`; None elsewhere. Not called for no place."""
    spread: list[float | None] = [None] * count
    values = per_rollout(word, function, available, len(places)) if places else []
    for place, value in zip(places, values, strict=True):
        spread[place] = value
    return spread


# --- of the whole batch ---------------------------------------------------------------------------------------------


def batch_advantages(function: Function, available: Mapping[str, Any], count: int) -> tuple[Tensor, Tensor | None]:
    """The advantages [T] of all `count` tokens and, where the function returns them too, the critic's targets [T].

    `available` holds `mask` [T] and whatever else the function may name. Both are detached, and 0 where the mask is,
    whatever the function says there. Where nothing is live it is not called. Raises TrainingError for a wrong shape,
    and for NaN or an infinity at a live token.
    """
    import torch

    mask: Tensor = available["mask"]
    assert tuple(mask.shape) == (count,), f"mask {tuple(mask.shape)} of {count} tokens"
    live = mask > 0
    if not bool(live.any()):
        return torch.zeros_like(mask), None
    with torch.no_grad():
        returned = call_author("advantage", function, {"batch": None, **available})
    if isinstance(returned, tuple) and len(returned) == 2:
        advantages, returns = returned
        return _of_tokens(function, advantages, live, "advantages"), _of_tokens(function, returns, live, "returns")
    return _of_tokens(function, returned, live, "advantages"), None


def _of_tokens(function: Function, returned: Any, live: Tensor, name: str) -> Tensor:
    """What was returned for each token [T], detached, with zeros where nothing is live."""
    count = live.shape[0]
    values = _as_tensor(returned)
    if values is None or tuple(values.shape) != (count,):
        expected = f"[{count}], one number a token of the batch, or (advantages [{count}], returns [{count}])"
        raise wrong_result("advantage", function, f"as {name} {_shown(returned)}", expected)
    values = values.detach()
    faulty = int((~values.isfinite() & live).sum())
    if faulty:
        given = f"as {name} NaN or an infinity at {faulty} of {int(live.sum())} live tokens"
        raise wrong_result("advantage", function, given, "finite numbers there")
    return values.where(live, values.new_zeros(()))


def _as_tensor(returned: Any) -> Tensor | None:
    """What was returned as a tensor; None where it cannot be one."""
    import torch

    try:
        with authors_code():
            return torch.as_tensor(returned)
    except Exception:  # an object of the author's own may raise anything; the caller says what it was
        return None


def _shown(returned: Any) -> str:
    """What was returned, in at most a line."""
    import torch

    if isinstance(returned, torch.Tensor):
        return f"shape {tuple(returned.shape)}: {shown(returned.tolist())}"
    return f"{type(returned).__name__} {shown(returned)}"
