"""Advantages per token, of the whole batch: GAE, REINFORCE++, on-policy distillation.

Legend: T token positions of all rows, concatenated; the rows of a rollout are in order of time, and several segments of
a rollout are one sequence of actions. N rollouts; C the largest number of time steps of a rollout. A token is live if
`mask` is above 0. `turn_index` [T] is the turn of each token, and `turn_rewards` has N lists: the reward of each turn.
They are empty for rollouts that were not judged (their tokens are masked). A rollout without rewards by turn has all of
its reward in its last turn. `token_rewards` [T] are rewards of single tokens, such as -coefficient * KL.

Only live tokens are actions. Time steps go from one live token to the next, in the order of turns. Text of tools or
templates between them does not count: nothing is discounted across it, and its values are ignored, also NaN. The last
live token of a turn gets the turn's reward. If all tokens of a turn are masked, the live token before them gets it; if
there is none, no action had a part in this reward, and it is left out. Results are detached, and have the dtype of the
[T] inputs (float32 or float64). They are 0 at masked positions; for `distill`, which has no mask, the caller does that
(calls.py). `batch` is None: an advantage that names it is called for the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from rollouts.training.algorithms.advantages import SPREAD_MIN
from rollouts.training.algorithms.losses import check_setting, log_ratio

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WHITEN_EPS = 1e-8
TurnRewards = Sequence[Sequence[float]]


def gae(
    batch: None,
    turn_rewards: TurnRewards,
    values: Tensor,
    token_rewards: Tensor,
    mask: Tensor,
    rollout_index: Tensor,
    turn_index: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    per: Literal["token", "turn"] = "token",
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16): advantages and the critic's targets, both [T].

    Over the live tokens t of a rollout: delta_t = r_t + gamma V_t+1 - V_t, with V = 0 after the last; A_t = delta_t +
    gamma lam A_t+1; returns = A + V, before whitening. `values` [T] are the critic's values of the states before the
    tokens. r_t is the reward of a turn at its last token, so that with gamma = lam = 1, A_t is the sum of the rewards
    of this turn and later ones, minus V_t. With `per` "turn", the time steps of the formula are turns: V is that of a
    turn's first token, r is all that the turn earned, and all tokens of a turn have its advantage and its return.

    Args:
        gamma: discount from one time step to the next
        lam: 0 uses the critic only, 1 the rewards only
        per: whether time goes from one sampled token to the next, or from one turn to the next
        whiten: scale the advantages of all live tokens to mean 0 and deviation 1
    """
    import torch

    _check_discount("gamma", gamma)
    _check_discount("lam", lam)
    check_setting("per", per, per in ("token", "turn"), "token or turn", "--advantage.per turn")
    packing = _pack(mask, rollout_index, turn_index, turn_rewards, per_turn=per == "turn")
    values = values.detach()
    values_N_C = packing.first(values)
    after = torch.nn.functional.pad(values_N_C, (0, 1))[:, 1:]
    deltas = _rewards_of_steps(packing, turn_rewards, token_rewards, values.dtype) + gamma * after - values_N_C
    advantages_N_C = _discounted(deltas, gamma * lam)
    advantages = packing.scatter(advantages_N_C)
    returns = packing.scatter(advantages_N_C + values_N_C)
    return (_whitened(advantages, packing.live, WHITEN_EPS) if whiten else advantages), returns


def reinforce_pp(
    batch: None,
    turn_rewards: TurnRewards,
    token_rewards: Tensor,
    mask: Tensor,
    rollout_index: Tensor,
    turn_index: Tensor,
    *,
    gamma: float = 1.0,
    eps: float = 1e-8,
) -> Tensor:
    """REINFORCE++ (Hu 2025): discounted returns of the tokens [T], whitened over the whole batch.

    Over the live tokens t of a rollout: G_t = r_t + gamma G_t+1; A = (G - mean) / (std + eps) over all live tokens of
    the batch, ddof 1. r_t is the reward of a turn at its last token.

    Args:
        gamma: discount from one sampled token to the next; 1 gives every token all that its turn and later ones earned
        eps: added to the deviation
    """
    _check_discount("gamma", gamma)
    check_setting("eps", eps, 0 <= eps < float("inf"), "a number of 0 or more", "--advantage.eps 1e-8")
    packing = _pack(mask, rollout_index, turn_index, turn_rewards)
    returns = _discounted(_rewards_of_steps(packing, turn_rewards, token_rewards, token_rewards.dtype), gamma)
    return _whitened(packing.scatter(returns), packing.live, eps)


def distill(batch: None, rollout_logprobs: Tensor, teacher_logprobs: Tensor, *, coef: float = 1.0) -> Tensor:
    """On-policy distillation: -coef (log pi - log pi_teacher) [T], detached (Agarwal et al. 2024; Lu 2025).

    The reward of a token is its part of the reverse KL to the teacher, with a minus sign. Later tokens do not count. pi
    is the sampler's, and the log-ratio is clamped to +-20. If student and teacher are equal, the advantage is 0.

    Args:
        coef: weight of the teacher
    """
    check_setting("coef", coef, 0 < coef < float("inf"), "a number above 0", "--advantage.coef 1")
    return coef * log_ratio(teacher_logprobs, rollout_logprobs).detach()


def rewards_to_go(token_rewards: Tensor, mask: Tensor, rollout_index: Tensor, turn_index: Tensor) -> Tensor:
    """The sum of a token's reward and those of later live tokens in its rollout [T], undiscounted.

    Added to an advantage of the rollout's own reward, it gives the policy gradient of both (Williams 1992; Sutton et
    al. 2000): a token is credited for what follows it only.
    """
    count, turns = (int(index.max()) + 1 if len(index) else 0 for index in (rollout_index, turn_index))
    packing = _pack(mask, rollout_index, turn_index, [[0.0] * turns] * count)
    return packing.scatter(_discounted(packing.total(token_rewards.detach()), 1.0))


class _Packing(NamedTuple):
    """Where the live tokens [L] of the batch [T] are in [N, C], in order of time. A column is a time step.

    `live` [L] are their positions in the batch of `size` T. `rows` and `columns` [L] are their rollout and time step,
    `turns` [L] their turn, and `begins` [L] says whether a token is the first of its time step. `lengths` [N] are the
    numbers of time steps.
    """

    live: Tensor
    rows: Tensor
    columns: Tensor
    turns: Tensor
    begins: Tensor
    lengths: Tensor
    size: int

    def first(self, stream: Tensor) -> Tensor:
        """The values [T] of the first token of each time step: [N, C], with zeros after a rollout's last."""
        packed = self._zeros(stream)
        packed[self.rows[self.begins], self.columns[self.begins]] = stream[self.live[self.begins]]
        return packed

    def total(self, stream: Tensor) -> Tensor:
        """The sum of the values [T] of the tokens of each time step: [N, C], with zeros after a rollout's last."""
        return self._zeros(stream).index_put_((self.rows, self.columns), stream[self.live], accumulate=True)

    def scatter(self, packed: Tensor) -> Tensor:
        """[N, C] -> [T], zeros where masked."""
        stream = packed.new_zeros(self.size)
        stream[self.live] = packed[self.rows, self.columns]
        return stream

    def _zeros(self, stream: Tensor) -> Tensor:
        return stream.new_zeros(len(self.lengths), int(self.lengths.max()) if len(self.lengths) else 0)


def _pack(
    mask: Tensor, rollout_index: Tensor, turn_index: Tensor, turn_rewards: TurnRewards, *, per_turn: bool = False
) -> _Packing:
    """The live tokens by rollout, turn and position. A turn beyond the last one with a reward counts as the last."""
    import torch

    assert mask.shape == rollout_index.shape, f"mask {tuple(mask.shape)}, rollout_index {tuple(rollout_index.shape)}"
    assert mask.shape == turn_index.shape, f"mask {tuple(mask.shape)}, turn_index {tuple(turn_index.shape)}"
    rollouts, device = len(turn_rewards), mask.device
    live = (mask > 0).nonzero().squeeze(1)
    last = int(rollout_index[live].max()) if len(live) else -1
    assert last < rollouts, f"a token is of rollout {last}, but there are turn_rewards of {rollouts}"
    counts = torch.tensor([max(len(turns), 1) for turns in turn_rewards], dtype=torch.int64, device=device)
    turns = turn_index[live].minimum(counts[rollout_index[live]] - 1)
    # Rows of other rollouts may be between two segments of one rollout, and another conversation of the episode may
    # come before or after the judged one. A stable order keeps the order of time within a turn.
    order = (rollout_index[live] * (int(counts.max()) if rollouts else 1) + turns).argsort(stable=True)
    live, turns = live[order], turns[order]
    rows = rollout_index[live]
    begins = torch.ones_like(live, dtype=torch.bool)
    if per_turn:
        begins[1:] = (rows[1:] != rows[:-1]) | (turns[1:] != turns[:-1])
    lengths = torch.bincount(rows[begins], minlength=rollouts)
    columns = begins.cumsum(0) - 1 - (lengths.cumsum(0) - lengths)[rows]
    return _Packing(live, rows, columns, turns, begins, lengths, mask.shape[0])


def _rewards_of_steps(
    packing: _Packing, turn_rewards: TurnRewards, token_rewards: Tensor, dtype: torch.dtype
) -> Tensor:
    """The reward of each time step [N, C]: those of its tokens, and at the last token of a turn the turn's."""
    import torch

    packed = packing.total(token_rewards.detach().to(dtype))
    most = max(map(len, turn_rewards), default=0)
    if not most or not len(packing.live):
        return packed
    padded = torch.tensor([[*turns, *[0.0] * (most - len(turns))] for turns in turn_rewards], dtype=torch.float64)
    # The last step [N, turns] up to the end of each turn; -1: there is none.
    ends = torch.full((padded.numel(),), -1, dtype=torch.int64, device=packed.device)
    ends.scatter_reduce_(0, packing.rows * most + packing.turns, packing.columns, "amax")
    ends = ends.reshape(padded.shape).cummax(1).values
    rollouts, turns = (ends >= 0).nonzero(as_tuple=True)
    given = padded.to(packed.device, dtype)[rollouts, turns]
    return packed.index_put_((rollouts, ends[rollouts, turns]), given, accumulate=True)


def _discounted(steps: Tensor, factor: float) -> Tensor:
    """x_t = steps_t + factor x_t+1 along the second axis [N, C]; one operation per column for all rollouts."""
    import torch

    columns = list(steps.unbind(1))
    for place in range(len(columns) - 2, -1, -1):
        columns[place] = columns[place] + factor * columns[place + 1]
    return torch.stack(columns, 1) if columns else steps


def _whitened(stream: Tensor, live: Tensor, eps: float) -> Tensor:
    """(x - mean) / (std + eps) over the live positions, ddof 1; zeros elsewhere, and zeros if there is no spread."""
    import torch

    known = stream[live]
    whitened = torch.zeros_like(stream)
    if known.numel() < 2 or float(known.max() - known.min()) <= SPREAD_MIN:  # with a NaN this is False
        return whitened
    whitened[live] = (known - known.mean()) / (known.std() + eps)
    return whitened


def _check_discount(name: str, value: float) -> None:
    check_setting(name, value, 0 <= value <= 1, "a number from 0 to 1", f"--advantage.{name} 1")
