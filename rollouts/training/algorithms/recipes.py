"""The named algorithms, composed of pure functions.

None has a KL term, so no reference policy is loaded (`--kl rk3_loss` adds one). The entropy term has coefficient 0, and
is only computed if `--loss.entropy-coef` sets another.
"""

from __future__ import annotations

import functools

from rollouts.errors import ConfigError, near_misses
from rollouts.training.algorithms import losses
from rollouts.training.algorithms.advantages import group_mean, group_norm, ones, rloo
from rollouts.training.algorithms.algorithm import Algorithm, Term
from rollouts.training.algorithms.rewards import overlong
from rollouts.training.algorithms.selection import best_worst, reward_at_least
from rollouts.training.algorithms.token_advantages import distill, gae, reinforce_pp
from rollouts.training.filters import accuracy_std

_ENTROPY = Term(losses.entropy_bonus, 0.0, "entropy")
_CLIP_HIGHER = Term(functools.partial(losses.ppo_clip, clip_high=0.28))

GRPO = Algorithm(group_norm, "token_mean", (Term(losses.ppo_clip), _ENTROPY))
"""GRPO (Shao et al. 2024): the clipped surrogate, with rewards normalized within each group."""
PPO = Algorithm(gae, "token_mean", (Term(losses.ppo_clip), Term(losses.value_loss, 0.5, "value"), _ENTROPY))
"""PPO (Schulman et al. 2017): the clipped surrogate, with a critic and generalized advantage estimation."""
DAPO = Algorithm(group_norm, "token_mean", (_CLIP_HIGHER, _ENTROPY), shaping=(overlong,), filters=(accuracy_std,))
"""DAPO (Yu et al. 2025): GRPO with a higher upper clip, a penalty for overlong replies, and a filter that drops groups
without a signal.
"""
DR_GRPO = Algorithm(group_mean, "dr_grpo", (Term(losses.ppo_clip), _ENTROPY))
"""GRPO without division by the standard deviation or the length (Dr. GRPO, Liu et al. 2025)."""
GSPO = Algorithm(group_norm, "rollout_mean", (Term(losses.gspo), _ENTROPY))
"""GSPO (Zheng et al. 2025): GRPO with one ratio for each rollout instead of one for each token."""
CISPO = Algorithm(group_norm, "token_mean", (Term(losses.cispo), _ENTROPY))
"""CISPO (MiniMax 2025): clips the importance weight, so that every token keeps its gradient."""
REINFORCE = Algorithm(group_norm, "token_mean", (Term(losses.reinforce), _ENTROPY))
"""REINFORCE (Williams 1992), with rewards normalized within each group."""
REINFORCE_PP = Algorithm(reinforce_pp, "token_mean", (Term(losses.ppo_clip), _ENTROPY))
"""REINFORCE++ (Hu 2025): the clipped surrogate, with advantages normalized over the whole batch."""
RLOO = Algorithm(rloo, "rollout_sum", (Term(losses.reinforce), _ENTROPY))
"""RLOO (Ahmadian et al. 2024): REINFORCE on whole rollouts. The baseline is the mean reward of the other rollouts."""
IS = Algorithm(group_norm, "token_mean", (Term(losses.importance), _ENTROPY))
"""The policy gradient with an unclipped importance ratio, and rewards normalized within each group."""
SFT = Algorithm(ones, "token_mean", (Term(losses.cross_entropy),))  # its rows have no rewards: no advantage is computed
"""Supervised fine-tuning: cross-entropy on demonstrations."""
RFT = Algorithm(ones, "token_mean", (Term(losses.cross_entropy), _ENTROPY), select=reward_at_least)
"""Rejection fine-tuning: cross-entropy on the rollouts whose reward is high enough."""
DPO = Algorithm(group_norm, "pair_mean", (Term(losses.dpo),), pairs=best_worst)
"""DPO (Rafailov et al. 2023), on the best and the worst rollout of each prompt."""
OPD = Algorithm(distill, "token_mean", (Term(losses.importance), _ENTROPY))
"""On-policy distillation (Agarwal et al. 2024; Lu 2025): the reverse KL to a teacher as the reward of each token."""


def built_in(name: str) -> Algorithm:
    """The algorithm of this name in lower case. Raises ConfigError.

    >>> built_in("grpo") is GRPO
    True
    """
    known = {key.lower(): value for key, value in globals().items() if isinstance(value, Algorithm)}
    if name not in known:
        near = near_misses(name, known)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        choices = f"built-in: {', '.join(sorted(known))}; give any other one as a loss function or an Algorithm"
        raise ConfigError(f"there is no built-in algorithm {name!r}{hint}\n{choices}")
    return known[name]
