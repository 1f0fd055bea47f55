"""The named algorithms: each is a few pure functions put together, never a subclass of another.

GRPO here leaves out the KL term and the reference model, as its default coefficient is 0.
"""

from __future__ import annotations

from rollouts.training.algorithms.advantages import group_norm
from rollouts.training.algorithms.algorithm import Algorithm, Term
from rollouts.training.algorithms.losses import cross_entropy, importance, ppo_clip, reinforce

__all__ = ["GRPO", "IS", "PPO", "REINFORCE", "SFT"]

GRPO = Algorithm(group_norm, "token_mean", (Term(ppo_clip),))
# PPO with a group baseline in place of a critic: the same composition.
PPO = GRPO
REINFORCE = Algorithm(group_norm, "token_mean", (Term(reinforce),))
IS = Algorithm(group_norm, "token_mean", (Term(importance),))
# Supervised rows carry no rewards; the advantage is never called for them.
SFT = Algorithm(group_norm, "token_mean", (Term(cross_entropy),))
