"""Calls of an author's functions: prepares their inputs and checks their results.

    group_advantages, mixed_rewards, shaped_rewards, selected, paired    of one group
    batch_advantages                                                     of the whole batch

Authors never see rollouts that were not judged: they are removed before the call and inserted after it. An exception or
an invalid result becomes a TrainingError that names the function.

Legend: G rollouts of a group, J of them passed to the function, T tokens of a batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollouts.author_code import authors_code, shown
from rollouts.errors import RolloutsError, TrainingError, words_of
from rollouts.plugins.signature import call_with, read_signature
from rollouts.training.algorithms.algorithm import function_label

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[..., Any]
Rewards = Sequence[float | None]
Parts = Mapping[str, float | None]


def call_author(word: str, function: Function, available: Mapping[str, Any]) -> Any:
    """Call the function with the inputs that it names. `word` is its kind in messages, such as "advantage".

    Raises TrainingError if the function raises.
    """
    try:
        return call_with(function, available)
    except RolloutsError:
        raise
    except Exception as error:  # an author's function may raise anything
        raise TrainingError(f"the {word} {function_label(function)} raised {words_of(error)}") from error


def wrong_result(word: str, function: Function, given: str, expected: str, but: str = "") -> TrainingError:
    """An error that says what a function returned and what it must return."""
    return TrainingError(f"the {word} {function_label(function)} {but}returned {given}; expected {expected}")


def check_per_rollout(word: str, function: Function, returned: Any, count: int) -> list[float]:
    """The `count` finite numbers that a function returned. Raises TrainingError, which names the function, for anything
    else.
    """
    values = _as_tensor(returned)
    if values is None or tuple(values.shape) != (count,) or not bool(values.isfinite().all()):
        raise _wrong(word, function, count, _shown(returned), f"{count} finite numbers, one per rollout")
    return [float(value) for value in values.tolist()]


# --- of one group ---------------------------------------------------------------------------------------------------


def group_advantages(
    function: Function,
    rewards: Rewards,
    *,
    lengths: Sequence[int] | None = None,
    turn_rewards: Sequence[Any] | None = None,
) -> list[float | list[float]]:
    """The advantages [G] of a group, by a per-group function; 0.0 for rollouts that were not judged.

    The function gets `rewards` [J] (float64), and `lengths` [J] and `turn_rewards` (J lists) if it names them. Without
    `turn_rewards`, each reward is that of one turn. If the function returns a list of numbers for a rollout, one for
    each turn, so does this function, unless the rollout has one turn. Raises TrainingError if it does not return J
    finite numbers or such lists.
    """
    judged = _judged_indices(rewards)
    spread: list[float | list[float]] = [0.0] * len(rewards)
    if not judged:
        return spread
    available = _of_group(rewards, judged, lengths)
    by_turn = turn_rewards or [[reward] for reward in rewards]
    available["turn_rewards"] = [by_turn[index] for index in judged]
    returned = call_author("advantage", function, available)
    for index, value in zip(judged, check_advantages(function, returned, available["turn_rewards"]), strict=True):
        spread[index] = value
    return spread


def check_advantages(function: Function, returned: Any, turn_rewards: Sequence[Any]) -> list[float | list[float]]:
    """The numbers that the advantage of a group returned, one per rollout, or lists with one for each of its turns.

    Raises TrainingError, which names the function, for anything else. Only a function that names `turn_rewards` may
    return lists.
    """
    try:
        with authors_code():
            rows = [_as_tensor(row) for row in returned]
    except Exception:  # it cannot be iterated: the error below describes it
        rows = []
    lists = [row for row in rows if row is not None and row.dim() == 1]
    if not lists or len(lists) != len(rows) or "turn_rewards" not in read_signature(function, "advantages").requests:
        return [*check_per_rollout("advantage", function, returned, len(turn_rewards))]
    counts = [len(turns) for turns in turn_rewards]
    if [len(row) for row in lists] != counts or not all(bool(row.isfinite().all()) for row in lists):
        shapes = ", ".join(map(str, counts))
        expected = f"one finite number per rollout, or lists with one for each turn: of {shapes} numbers"
        raise wrong_result("advantage", function, shown([row.tolist() for row in lists]), expected)
    return [float(row) if len(row) == 1 else row.tolist() for row in lists]


def mixed_rewards(
    function: Function, parts: Sequence[Parts | None], weights: Mapping[str, float], *, step: int = 0
) -> list[float | None]:
    """The rewards [G] that a mixer computes from the parts. A rollout without parts (None) has no reward.

    The mixer gets the parts in the order of `weights`; other parts are only logged. A part is 0 if it could not be
    judged but the rollout counts (--on-invalid-reward zero). Raises TrainingError.
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
    """The rewards [G] after a shaping; None for rollouts that were not judged. Truncated rollouts are shaped too,
    because they are in the baseline. Raises TrainingError.
    """
    judged = _judged_indices(rewards)
    available = _of_group(rewards, judged, lengths) | {"max_tokens": max_tokens, "step": step}
    available["truncated"] = _tensor([bool(truncated[index]) for index in judged], "bool")
    return _at_places("reward shaping", function, available, judged, len(rewards))


def selected(
    function: Function, rewards: Rewards, eligible: Sequence[bool], *, lengths: Sequence[int], step: int = 0
) -> list[bool]:
    """Which rollouts of the group [G] are trained. The function only gets eligible ones; the others are not trained.

    Raises TrainingError if the function does not return one bool per rollout.
    """
    handed = _eligible(rewards, eligible)
    kept = [False] * len(rewards)
    if not handed:
        return kept
    returned = call_author("rollout selector", function, _of_group(rewards, handed, lengths) | {"step": step})
    values = _as_tensor(returned)
    if values is None or str(values.dtype) != "torch.bool" or tuple(values.shape) != (len(handed),):
        expected = f"{len(handed)} bools, one per rollout (such as `rewards >= 1.0`)"
        raise _wrong("rollout selector", function, len(handed), _shown(returned), expected)
    for index, keep in zip(handed, values.tolist(), strict=True):
        kept[index] = keep
    return kept


def paired(
    function: Function, rewards: Rewards, eligible: Sequence[bool], *, lengths: Sequence[int], step: int = 0
) -> list[tuple[int, int]]:
    """The (chosen, rejected) pairs, as positions in the whole group. The function only gets eligible rollouts.

    Raises TrainingError if a pair is not two different positions of the rollouts that it got.
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


def _judged_indices(rewards: Rewards) -> list[int]:
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
    """The numbers that the function returns, at these `places`; None elsewhere. The function is not called if `places`
    is empty.
    """
    spread: list[float | None] = [None] * count
    if not places:
        return spread
    returned = call_author(word, function, available)
    for place, value in zip(places, check_per_rollout(word, function, returned, len(places)), strict=True):
        spread[place] = value
    return spread


# --- of the whole batch ---------------------------------------------------------------------------------------------


def batch_advantages(function: Function, available: Mapping[str, Any], count: int) -> tuple[Tensor, Tensor | None]:
    """The advantages [T] of all `count` tokens, and the critic's targets [T] if the function returns them, else None.

    `available` has `mask` [T] and all other names of the vocabulary. The results are detached, and 0 where the mask is
    0. The function is not called if nothing is live. Raises TrainingError for a wrong shape, and for NaN or an infinity
    at a live token.
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
    """The result for each token [T], detached, with 0 where nothing is live."""
    count = live.shape[0]
    values = _as_tensor(returned)
    if values is None or tuple(values.shape) != (count,):
        expected = f"[{count}], one number per token of the batch, or (advantages [{count}], returns [{count}])"
        raise wrong_result("advantage", function, f"as {name} {_shown(returned)}", expected)
    values = values.detach()
    faulty = int((~values.isfinite() & live).sum())
    if faulty:
        given = f"as {name} NaN or an infinity at {faulty} of {int(live.sum())} live tokens"
        raise wrong_result("advantage", function, given, "finite numbers there")
    return values.where(live, values.new_zeros(()))


def _as_tensor(returned: Any) -> Tensor | None:
    """The result as a tensor; None if that fails."""
    import torch

    try:
        with authors_code():
            return torch.as_tensor(returned)
    except Exception:  # an author's object may raise anything; the caller's message describes it
        return None


def _shown(returned: Any) -> str:
    """Describe a result in at most one line."""
    import torch

    if isinstance(returned, torch.Tensor):
        return f"shape {tuple(returned.shape)}: {shown(returned.tolist())}"
    return f"{type(returned).__name__} {shown(returned)}"
