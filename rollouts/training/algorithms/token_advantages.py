"""Advantages per token, of the whole batch: GAE, REINFORCE++, on-policy distillation.

Legend: T token positions of all rows, concatenated; the rows of a rollout are in order of time, and several segments of
a rollout are one sequence of actions. N rollouts; C the largest number of live tokens of a rollout. A token is live if
`mask` is above 0. `rewards` [N] are NaN for rollouts that were not judged (their tokens are masked). `token_rewards`
[T] are rewards of single tokens, such as -coefficient * KL.

Only live tokens are actions. Time steps go from one live token to the next. Text of tools or templates between them
does not count: nothing is discounted across it, and its values are ignored, also NaN. The last live token gets the
rollout's reward. Results are detached, and have the dtype of the [T] inputs (float32 or float64). They are 0 at masked
positions; for `distill`, which has no mask, the caller does that (calls.py). `batch` is None: an advantage that names
it is called for the whole batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rollouts.training.algorithms.advantages import SPREAD_MIN
from rollouts.training.algorithms.losses import check_setting, log_ratio

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WHITEN_EPS = 1e-8


def gae(
    batch: None,
    rewards: Tensor,
    values: Tensor,
    token_rewards: Tensor,
    mask: Tensor,
    rollout_index: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16): advantages and the critic's targets, both [T].

    Over the live tokens t of a rollout: delta_t = r_t + gamma V_t+1 - V_t, with V = 0 after the last; A_t = delta_t +
    gamma lam A_t+1; returns = A + V, before whitening. `values` [T] are the critic's values of the states before the
    tokens.
    Args:
        gamma: discount from one sampled token to the next
        lam: 0 uses the critic only, 1 the rewards only
        whiten: scale the advantages of all live tokens to mean 0 and deviation 1
    """
    import torch

    _check_discount("gamma", gamma)
    _check_discount("lam", lam)
    packing = _pack(mask, rollout_index, rewards.shape[0])
    values = values.detach()
    values_N_C = packing.gather(values)
    after = torch.nn.functional.pad(values_N_C, (0, 1))[:, 1:]
    deltas = _rewards_of_actions(packing, rewards, token_rewards, values.dtype) + gamma * after - values_N_C
    advantages_N_C = _discounted(deltas, gamma * lam)
    advantages = packing.scatter(advantages_N_C)
    returns = packing.scatter(advantages_N_C + values_N_C)
    return (_whitened(advantages, packing.live, WHITEN_EPS) if whiten else advantages), returns


def reinforce_pp(
    batch: None,
    rewards: Tensor,
    token_rewards: Tensor,
    mask: Tensor,
    rollout_index: Tensor,
    *,
    gamma: float = 1.0,
    eps: float = 1e-8,
) -> Tensor:
    """REINFORCE++ (Hu 2025): discounted returns of the tokens [T], whitened over the whole batch.

    Over the live tokens t of a rollout: G_t = r_t + gamma G_t+1; A = (G - mean) / (std + eps) over all live tokens of
    the batch, ddof 1.

    Args:
        gamma: discount from one sampled token to the next; 1 gives every token its rollout's return
        eps: added to the deviation
    """
    _check_discount("gamma", gamma)
    check_setting("eps", eps, 0 <= eps < float("inf"), "a number of 0 or more", "--advantage.eps 1e-8")
    packing = _pack(mask, rollout_index, rewards.shape[0])
    returns = _discounted(_rewards_of_actions(packing, rewards, token_rewards, token_rewards.dtype), gamma)
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


def rewards_to_go(token_rewards: Tensor, mask: Tensor, rollout_index: Tensor) -> Tensor:
    """The sum of a token's reward and those of later live tokens in its rollout [T], undiscounted.

    Added to an advantage of the rollout's own reward, it gives the policy gradient of both (Williams 1992; Sutton et
    al. 2000): a token is credited for what follows it only.
    """
    packing = _pack(mask, rollout_index, int(rollout_index.max()) + 1 if len(rollout_index) else 0)
    return packing.scatter(_discounted(packing.gather(token_rewards.detach()), 1.0))


class _Packing(NamedTuple):
    """Where the live tokens [L] of the batch [T] are in [N, C]: row `rows` and column `columns` of each.

    `lengths` [N] are the numbers of live tokens. `live` [L] are their positions in the batch of `size` T.
    """

    live: Tensor
    rows: Tensor
    columns: Tensor
    lengths: Tensor
    size: int

    def gather(self, stream: Tensor) -> Tensor:
        """The live tokens' values [T] -> [N, C], with zeros after a rollout's last."""
        packed = stream.new_zeros(self.lengths.shape[0], int(self.lengths.max()) if len(self.lengths) else 0)
        packed[self.rows, self.columns] = stream[self.live]
        return packed

    def scatter(self, packed: Tensor) -> Tensor:
        """[N, C] -> [T], zeros where masked."""
        stream = packed.new_zeros(self.size)
        stream[self.live] = packed[self.rows, self.columns]
        return stream


def _pack(mask: Tensor, rollout_index: Tensor, rollouts: int) -> _Packing:
    import torch

    assert mask.shape == rollout_index.shape, f"mask {tuple(mask.shape)}, rollout_index {tuple(rollout_index.shape)}"
    live = (mask > 0).nonzero().squeeze(1)
    # Rows of other rollouts may be between two segments of one rollout. A stable order keeps the order of time.
    live = live[rollout_index[live].argsort(stable=True)]
    rows = rollout_index[live]
    lengths = torch.bincount(rows, minlength=rollouts)
    assert len(lengths) == rollouts, f"a token is of rollout {len(lengths) - 1}, but there are {rollouts} rewards"
    starts = lengths.cumsum(0) - lengths
    columns = torch.arange(len(rows), device=rows.device) - starts[rows]
    return _Packing(live, rows, columns, lengths, mask.shape[0])


def _rewards_of_actions(packing: _Packing, rewards: Tensor, token_rewards: Tensor, dtype: torch.dtype) -> Tensor:
    """The reward of each action [N, C]: the token's reward; the last one also gets the rollout's."""
    packed = packing.gather(token_rewards.detach().to(dtype))
    acted = packing.lengths.nonzero().squeeze(1)  # rollouts without a live token get no reward
    packed[acted, packing.lengths[acted] - 1] += rewards.detach()[acted].to(dtype)
    return packed


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
