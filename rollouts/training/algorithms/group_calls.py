"""The careful callers of an author's functions: what is handed over, and what has to come back.

    mixed_rewards, shaped_rewards, selected, paired    of one group; `group_advantages` stands in advantages.py
    batch_advantages                                   of the whole batch

No author has to think of rollouts that were not judged: they are left out before the call and put back after it.
Whatever the function raises, and whatever it returns that is no result, becomes a TrainingError that names it.

Legend: G rollouts of a group, J of them handed over, T tokens of a batch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollouts.author_code import authors_code, shown
from rollouts.errors import RolloutsError, TrainingError, words_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["batch_advantages", "call_author", "mixed_rewards", "paired", "per_rollout", "selected", "shaped_rewards"]

Function = Callable[..., Any]


def mixed_rewards(
    function: Function,
    parts: Sequence[Mapping[str, float | None] | None],
    weights: Mapping[str, float],
    names: Sequence[str] | None = None,
    *,
    step: int = 0,
) -> list[float | None]:
    """The rewards [G] that a mixer makes of the parts of judged rollouts; the others, whose parts are None, stay None.

    `names` is the order of the rewards (by default that of `weights`); parts that it does not name are only logged. A
    part that could not be judged in a rollout that counts all the same (--on-invalid-reward zero) is 0. Raises
    TrainingError.
    """
    import torch

    order = list(weights if names is None else names)
    judged = [index for index, part in enumerate(parts) if part is not None]
    if judged and not order:
        raise TrainingError(
            f"the reward mixer {_label(function)} has no rewards to mix; type --reward with one or more"
        )
    rows = [[float(part.get(name) or 0.0) for name in order] for part in parts if part is not None]
    available = {
        "parts": torch.tensor(rows, dtype=torch.float64),
        "weights": torch.tensor([weights[name] for name in order], dtype=torch.float64),
        "step": step,
    }
    mixed = per_rollout("reward mixer", function, available, len(judged)) if judged else []
    return _spread(mixed, judged, len(parts))


def shaped_rewards(
    function: Function,
    rewards: Sequence[float | None],
    *,
    lengths: Sequence[int],
    truncated: Sequence[bool],
    max_tokens: int | None,
    step: int = 0,
) -> list[float | None]:
    """The rewards [G] after a shaping; what was not judged stays None. Truncated rollouts are shaped too: they are in
    the baseline. Raises TrainingError.
    """
    import torch

    judged = [index for index, reward in enumerate(rewards) if reward is not None]
    available = _of_group(rewards, lengths, judged, step)
    available |= {"truncated": torch.tensor([bool(truncated[index]) for index in judged]), "max_tokens": max_tokens}
    shaped = per_rollout("reward shaping", function, available, len(judged)) if judged else []
    return _spread(shaped, judged, len(rewards))


def selected(
    function: Function,
    rewards: Sequence[float | None],
    eligible: Sequence[bool],
    *,
    lengths: Sequence[int],
    step: int = 0,
) -> list[bool]:
    """Which rollouts of the group [G] are trained on; only eligible ones are handed over, the others are not.

    Raises TrainingError where the function does not return a bool a rollout.
    """
    import torch

    chosen = _eligible(rewards, eligible)
    kept = [False] * len(rewards)
    if not chosen:
        return kept
    returned = call_author("rollout selector", function, _of_group(rewards, lengths, chosen, step))
    values = _as_tensor(returned)
    if values is None or values.dtype != torch.bool or tuple(values.shape) != (len(chosen),):
        raise TrainingError(
            f"the rollout selector {_label(function)} got {len(chosen)} rewards and returned {_shown(returned)}; it "
            f"has to return {len(chosen)} bools, one a rollout (such as `rewards >= 1.0`)"
        )
    for index, keep in zip(chosen, values.tolist(), strict=True):
        kept[index] = keep
    return kept


def paired(
    function: Function,
    rewards: Sequence[float | None],
    eligible: Sequence[bool],
    *,
    lengths: Sequence[int],
    step: int = 0,
) -> list[tuple[int, int]]:
    """The (chosen, rejected) rollouts, as positions in the whole group; only eligible ones are handed over.

    Raises TrainingError for what is no pair of two different positions of those that were handed over.
    """
    handed = _eligible(rewards, eligible)
    if not handed:
        return []
    returned = call_author("pair selector", function, _of_group(rewards, lengths, handed, step))
    pairs = []
    try:
        for chosen, rejected in returned:
            pairs.append((operator.index(chosen), operator.index(rejected)))
    except (TypeError, ValueError) as error:
        raise _wrong_pairs(function, len(handed), _shown(returned)) from error
    for chosen, rejected in pairs:
        if not (0 <= chosen < len(handed) and 0 <= rejected < len(handed)) or chosen == rejected:
            raise _wrong_pairs(function, len(handed), f"the pair ({chosen}, {rejected})")
    return [(handed[chosen], handed[rejected]) for chosen, rejected in pairs]


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


def call_author(word: str, function: Function, available: Mapping[str, Any], label: str = "") -> Any:
    """What the function returns when it is called with what it names. Raises TrainingError for whatever it raises.

    `word` is what it is ("advantage"), `label` its name where that is not the function's own.
    """
    from rollouts.plugins.signature import call_with

    try:
        return call_with(function, available)
    except RolloutsError:
        raise
    except Exception as error:  # the author's code may raise anything
        raise TrainingError(f"the {word} {label or _label(function)} raised {words_of(error)}") from error


def per_rollout(
    word: str, function: Function, available: Mapping[str, Any], count: int, label: str = ""
) -> list[float]:
    """The `count` finite numbers, one a rollout, that the function returns. Raises TrainingError, naming it."""
    import torch

    returned = call_author(word, function, available, label)
    values = _as_tensor(returned)
    if values is None or tuple(values.shape) != (count,) or not bool(torch.isfinite(values).all()):
        raise TrainingError(
            f"the {word} {label or _label(function)} got {count} rewards and returned {_shown(returned)}; it has to "
            f"return {count} finite numbers, one a rollout"
        )
    return [float(value) for value in values.tolist()]


def _of_tokens(function: Function, returned: Any, live: Tensor, name: str) -> Tensor:
    """What was returned for each token [T], detached, with zeros where nothing is live."""
    import torch

    count = live.shape[0]
    values = _as_tensor(returned)
    if values is None or tuple(values.shape) != (count,):
        raise TrainingError(
            f"the advantage {_label(function)} returned as {name} {_shown(returned)}; it has to return [{count}], one "
            f"number a token of the batch, or (advantages [{count}], returns [{count}])"
        )
    values = values.detach()
    faulty = int((~torch.isfinite(values) & live).sum())
    if faulty:
        raise TrainingError(
            f"the advantage {_label(function)} returned as {name} NaN or an infinity at {faulty} of {int(live.sum())} "
            "live tokens; it has to return finite numbers there"
        )
    return torch.where(live, values, torch.zeros_like(values))


def _of_group(
    rewards: Sequence[float | None], lengths: Sequence[int], handed: Sequence[int], step: int
) -> dict[str, Any]:
    import torch

    return {
        "rewards": torch.tensor([rewards[index] for index in handed], dtype=torch.float64),
        "lengths": torch.tensor([lengths[index] for index in handed], dtype=torch.int64),
        "step": step,
    }


def _eligible(rewards: Sequence[float | None], eligible: Sequence[bool]) -> list[int]:
    chosen = [index for index, may in enumerate(eligible) if may]
    for index in chosen:
        assert rewards[index] is not None, f"rollout {index} may be trained on, but was not judged: {list(rewards)}"
    return chosen


def _spread(values: Sequence[float], places: Sequence[int], count: int) -> list[float | None]:
    """The values at their places of `count`; None elsewhere."""
    spread: list[float | None] = [None] * count
    for place, value in zip(places, values, strict=True):
        spread[place] = value
    return spread


def _wrong_pairs(function: Function, count: int, given: str) -> TrainingError:
    return TrainingError(
        f"the pair selector {_label(function)} got {count} rewards and returned {given}; it has to return a list of "
        f"(chosen, rejected), two different positions from 0 to {count - 1}"
    )


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


def _label(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", repr(function)))
