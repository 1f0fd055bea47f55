"""Advantages of one group: rewards [G] in, advantages [G] out.

A reward that could not be judged (None or NaN) is left out of mean and deviation and gets 0, as does every rollout of a
group in which nothing can be compared: one judged rollout, or a spread of at most `SPREAD_MIN`. Pure functions. Left
out here: whole-batch advantages (GAE, REINFORCE++).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rollouts.errors import RolloutsError, TrainingError, words_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SPREAD_MIN", "group_advantages", "group_mean", "group_norm"]

# Never test `std == 0`: eight rewards of 0.1 + 0.2 have a deviation of 6e-17, not of 0.
SPREAD_MIN = 1e-6


def group_norm(rewards: Tensor | Sequence[float | None], *, eps: float = 1e-4) -> Tensor:
    """(R - mean) / (std + eps) [G] with ddof 1 (GRPO, Shao et al. 2024).

    >>> [round(a, 3) for a in group_norm([1.0, 0.0, 0.0, None]).tolist()]
    [1.154, -0.577, -0.577, 0.0]

    Args:
        eps: added to the deviation
    """
    values, judged = _judged(rewards)
    centred = _centred(values, judged)
    count = judged.sum()
    deviation = ((centred**2).sum() / (count - 1).clamp(min=1)).sqrt()
    return centred / (deviation + eps)


def group_mean(rewards: Tensor | Sequence[float | None]) -> Tensor:
    """R - mean [G] (Dr. GRPO, Liu et al. 2025)."""
    return _centred(*_judged(rewards))


def group_advantages(
    function: Callable[..., Any],
    rewards: Sequence[float | None],
    *,
    lengths: Sequence[int] | None = None,
    turn_rewards: Sequence[Any] | None = None,
    label: str = "",
) -> list[float]:
    """Call any per-group advantage function on the judged rollouts of one group; the others get 0.0.

    The function is handed `rewards` [J] (float64) and, where it names them, `lengths` [J] and `turn_rewards`, so no
    author has to think of None. Raises TrainingError where it does not return J finite numbers.
    """
    import torch

    from rollouts.plugins.signature import call_with

    judged = [index for index, reward in enumerate(rewards) if reward is not None]
    if not judged:
        return [0.0] * len(rewards)
    available: dict[str, Any] = {"rewards": torch.tensor([rewards[index] for index in judged], dtype=torch.float64)}
    if lengths is not None:
        available["lengths"] = torch.tensor([lengths[index] for index in judged])
    if turn_rewards is not None:
        available["turn_rewards"] = [turn_rewards[index] for index in judged]
    name = label or getattr(function, "__name__", repr(function))
    try:
        values = torch.as_tensor(call_with(function, available))
    except RolloutsError:
        raise
    except Exception as error:  # the author's code may raise anything
        raise TrainingError(f"the advantage {name} raised {words_of(error)}") from error
    if tuple(values.shape) != (len(judged),) or not bool(torch.isfinite(values).all()):
        raise TrainingError(
            f"the advantage {name} got {len(judged)} rewards and returned shape {tuple(values.shape)}: "
            f"{values.tolist()}; it has to return {len(judged)} finite numbers, one a rollout"
        )
    advantages = [0.0] * len(rewards)
    for index, value in zip(judged, values.tolist(), strict=True):
        advantages[index] = value
    return advantages


def _judged(rewards: Tensor | Sequence[float | None]) -> tuple[Tensor, Tensor]:
    """The rewards as a float tensor [G] with 0 for what was not judged, and the bool mask [G] of what was."""
    import torch

    if not isinstance(rewards, torch.Tensor):
        given = [float("nan") if reward is None else reward for reward in rewards]
        rewards = torch.tensor(given, dtype=torch.float64)
    elif not rewards.is_floating_point():
        rewards = rewards.double()
    judged = ~rewards.isnan()
    return torch.where(judged, rewards, torch.zeros_like(rewards)), judged


def _centred(values: Tensor, judged: Tensor) -> Tensor:
    """The rewards minus their mean [G]; zeros where there is nothing to compare."""
    import torch

    count = int(judged.sum())
    if count < 2:
        return torch.zeros_like(values)
    known = values[judged]
    if float(known.max() - known.min()) <= SPREAD_MIN:
        return torch.zeros_like(values)
    return torch.where(judged, values - known.mean(), torch.zeros_like(values))
