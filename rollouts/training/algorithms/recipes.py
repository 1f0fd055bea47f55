"""The named algorithms: each is a few pure functions put together, never a subclass of another.

None brings a KL term: its default coefficient is 0, and then no reference policy is loaded (`--kl rk3_loss` adds one).
The entropy term counts 0 until `--loss.entropy-coef` says otherwise, and is not computed before.
"""

from __future__ import annotations

import functools

from rollouts.training.algorithms.advantages import group_mean, group_norm, ones, rloo
from rollouts.training.algorithms.algorithm import Algorithm, Term
from rollouts.training.algorithms.losses import (
    cispo,
    cross_entropy,
    dpo,
    entropy_bonus,
    gspo,
    importance,
    ppo_clip,
    reinforce,
    value_loss,
)
from rollouts.training.algorithms.rewards import overlong
from rollouts.training.algorithms.selection import best_worst, reward_at_least
from rollouts.training.algorithms.token_advantages import distill, gae, reinforce_pp
from rollouts.training.filters import accuracy_std

_ENTROPY = Term(entropy_bonus, 0.0, "entropy")
_CLIP_HIGHER = Term(functools.partial(ppo_clip, clip_high=0.28))

# Shao et al. 2024
GRPO = Algorithm(group_norm, "token_mean", (Term(ppo_clip), _ENTROPY))
# Schulman et al. 2017, with a critic
PPO = Algorithm(gae, "token_mean", (Term(ppo_clip), Term(value_loss, 0.5, "value"), _ENTROPY))
# Yu et al. 2025: clip higher, the mean over tokens, a penalty for overlong replies, groups that teach nothing dropped
DAPO = Algorithm(group_norm, "token_mean", (_CLIP_HIGHER, _ENTROPY), shaping=(overlong,), filters=(accuracy_std,))
# Liu et al. 2025: neither a deviation nor a length divides
DR_GRPO = Algorithm(group_mean, "dr_grpo", (Term(ppo_clip), _ENTROPY))
# Zheng et al. 2025: the ratio of a sequence
GSPO = Algorithm(group_norm, "rollout_mean", (Term(gspo), _ENTROPY))
# MiniMax 2025: the weight is clipped, every token keeps its gradient
CISPO = Algorithm(group_norm, "token_mean", (Term(cispo), _ENTROPY))
REINFORCE = Algorithm(group_norm, "token_mean", (Term(reinforce), _ENTROPY))
# Hu 2025
REINFORCE_PP = Algorithm(reinforce_pp, "token_mean", (Term(ppo_clip), _ENTROPY))
# Ahmadian et al. 2024: the likelihood of a whole rollout, so its tokens are summed, not averaged
RLOO = Algorithm(rloo, "rollout_sum", (Term(reinforce), _ENTROPY))
IS = Algorithm(group_norm, "token_mean", (Term(importance), _ENTROPY))
# Supervised rows carry no rewards; the advantage is never called for them.
SFT = Algorithm(ones, "token_mean", (Term(cross_entropy),))
# Rejection fine-tuning: the likelihood of the rollouts that were good enough.
RFT = Algorithm(ones, "token_mean", (Term(cross_entropy), _ENTROPY), select=reward_at_least)
# Rafailov et al. 2023, on pairs of rollouts of one prompt
DPO = Algorithm(group_norm, "pair_mean", (Term(dpo),), pairs=best_worst)
# On-policy distillation: the reverse KL to a teacher as a reward a token
OPD = Algorithm(distill, "token_mean", (Term(importance), _ENTROPY))
