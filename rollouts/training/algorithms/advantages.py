"""Advantages of one group: rewards [G] in, advantages [G] out. Pure functions.

A reward that could not be judged (None or NaN) does not count in mean and deviation, and gets the advantage 0. All
advantages are 0 if the group has fewer than two judged rollouts, or a spread of at most `SPREAD_MIN`. `baseline` and
`ones` do not compare rollouts, so this rule does not hold for them. Not here: advantages of the whole batch, such as
GAE and REINFORCE++ (token_advantages.py), and calls of advantage functions (calls.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollouts.training.algorithms.losses import check_setting

if TYPE_CHECKING:
    from torch import Tensor

# Never test `std == 0`: eight rewards of 0.1 + 0.2 have a deviation of 6e-17.
SPREAD_MIN = 1e-6


def group_norm(rewards: Tensor | Sequence[float | None], *, eps: float = 1e-4) -> Tensor:
    """The normalized reward: (R - mean) / (std + eps) [G] over the group, ddof 1 (GRPO, Shao et al. 2024).

    >>> [round(a, 2) for a in group_norm([1.0, 0.0, 0.0, None]).tolist()]
    [1.15, -0.58, -0.58, 0.0]

    Args:
        eps: added to the deviation, so that a small spread does not give large advantages
    """
    check_setting("eps", eps, 0 <= eps < float("inf"), "a number of 0 or more", "--advantage.eps 1e-4")
    values, judged = _judged(rewards)
    centered = _centered(values, judged)
    if not bool(centered.any()):  # with an eps of 0, this would be 0 / 0
        return centered
    deviation = ((centered**2).sum() / (judged.sum() - 1)).sqrt()
    return centered / (deviation + eps)


def group_mean(rewards: Tensor | Sequence[float | None]) -> Tensor:
    """The reward minus the group's mean: R - mean [G] (Dr. GRPO, Liu et al. 2025)."""
    return _centered(*_judged(rewards))


def rloo(rewards: Tensor | Sequence[float | None]) -> Tensor:
    """The reward minus the mean reward of the group's other rollouts: J / (J - 1) (R - mean) [G] (RLOO, Ahmadian et al.
    2024).

    J is the number of judged rollouts.

    >>> rloo([1.0, 0.0, 0.0]).tolist()
    [1.0, -0.5, -0.5]
    """
    values, judged = _judged(rewards)
    count = int(judged.sum())
    centered = _centered(values, judged)
    return centered * (count / (count - 1)) if count > 1 else centered


def turn_return(
    turn_rewards: Sequence[Sequence[float]], *, gamma: float = 1.0, scale: bool = True, eps: float = 1e-4
) -> list[Tensor]:
    """Credit by turn: each turn gets the discounted rewards from it on, compared with the group at the same turn.

    G_k = r_k + gamma G_k+1 over the turns k of a rollout, and A_k = (1 - 1/J) (G_k - b_k) / (std + eps). b_k is the
    mean return of the other rollouts at their turn k, and std is the deviation of all returns at turn k, ddof 1. If
    all J rollouts have a turn k, (1 - 1/J) (G_k - b_k) is G_k - mean. Others that ended earlier are left out. If all of
    them did, they are compared by the last turn that some of them have.

    This is GRPO with a reward for each step (Shao et al. 2024, section 4.1.3) whose baseline is that of the same turn
    (the time-dependent baseline of Williams 1992 and Greensmith et al. 2004). b_k depends on other rollouts alone. So
    without the division, the expected gradient is (1 - 1/J) sum_k E[G_k grad log pi(turn k)], whatever the numbers of
    turns are; with gamma 1 it is that of `group_mean`. Returns a tensor [turns] for each rollout.

    >>> [turns.tolist() for turns in turn_return([[1.0, 0.0], [0.0, 1.0]], scale=False)]
    [[0.0, -0.5], [0.0, 0.5]]
    >>> [turns.tolist() for turns in turn_return([[0.0, 0.0, 1.0], [0.0]], scale=False)]
    [[0.5, 0.5, 0.5], [-0.5]]

    Args:
        gamma: discount from one turn to the next; 0: a turn is judged by its own reward alone
        scale: divide by the deviation of the returns at this turn
        eps: added to the deviation
    """
    import torch

    check_setting("gamma", gamma, 0 <= gamma <= 1, "a number from 0 to 1", "--advantage.gamma 1")
    check_setting("eps", eps, 0 <= eps < float("inf"), "a number of 0 or more", "--advantage.eps 1e-4")
    most = max(map(len, turn_rewards), default=0)
    nothing = float("nan")
    rows = [[*turns, *[nothing] * (most - len(turns))] for turns in turn_rewards]
    padded = torch.tensor(rows, dtype=torch.float64).reshape(len(turn_rewards), most)
    returns = padded.clone()
    for turn in range(most - 2, -1, -1):
        returns[:, turn] += gamma * returns[:, turn + 1].nan_to_num(0.0)
    compare = functools.partial(group_norm, eps=eps) if scale else group_mean
    group = len(turn_rewards)
    if not most:
        return list(returns)
    compared, columns = returns.new_full((group,), nothing), []  # a rollout without turns is compared with none
    for own in returns.unbind(1):
        has_turn = ~own.isnan()
        compared = own if int(has_turn.sum()) > 1 else own.where(has_turn, compared)
        count = int((~compared.isnan()).sum())
        # A return has the weight 1 / count in its own mean. The factor makes that 1 / group at every turn.
        columns.append(compare(compared) * ((1 - 1 / group) / (1 - 1 / count) if count > 1 else 0.0))
    return [torch.stack(columns, 1)[row, : len(turns)] for row, turns in enumerate(turn_rewards)]


def baseline(rewards: Tensor | Sequence[float | None], *, value: float = 0.0) -> Tensor:
    """The reward minus a fixed number: R - b [G] (Williams 1992). The only rollout of a group has an advantage too.

    Args:
        value: b; a rollout with a reward above b becomes more likely
    """
    check_setting("value", value, abs(value) < float("inf"), "a finite number", "--advantage.value 0.5")
    values, judged = _judged(rewards)
    return (values - value).where(judged, 0)


def ones(rewards: Tensor | Sequence[float | None]) -> Tensor:
    """1 for every judged rollout [G], as in supervised learning and rejection tuning."""
    values, judged = _judged(rewards)
    return judged.to(values.dtype)


def _judged(rewards: Tensor | Sequence[float | None]) -> tuple[Tensor, Tensor]:
    """The rewards as a float tensor [G], 0 for those that were not judged, and a bool mask [G] of the judged ones."""
    import torch

    if not isinstance(rewards, torch.Tensor):
        given = [float("nan") if reward is None else reward for reward in rewards]
        rewards = torch.tensor(given, dtype=torch.float64)
    elif not rewards.is_floating_point():
        rewards = rewards.double()
    judged = ~rewards.isnan()
    return rewards.where(judged, 0), judged


def _centered(values: Tensor, judged: Tensor) -> Tensor:
    """The rewards minus their mean [G]; zeros if no rollouts can be compared."""
    known = values[judged]
    if len(known) < 2 or float(known.max() - known.min()) <= SPREAD_MIN:
        return values.new_zeros(values.shape)
    return (values - known.mean()).where(judged, 0)
