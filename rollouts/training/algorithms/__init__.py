"""Algorithms: pure functions on tensors, put together in NamedTuples.

    losses        one value a token
    advantages    of the rewards of one group
    aggregation   per-token weights u and the denominator D
    logprobs      logprobs and entropy in chunks
    algorithm     the composition, its checks and its evaluation
    recipes       GRPO, PPO, REINFORCE, IS, SFT

Nothing is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.training.algorithms.advantages import group_advantages, group_mean, group_norm
    from rollouts.training.algorithms.aggregation import aggregate
    from rollouts.training.algorithms.algorithm import (
        Algorithm,
        Term,
        algorithm_settings,
        as_algorithm,
        bind_algorithm,
        check_needs,
        needs,
    )
    from rollouts.training.algorithms.logprobs import logprobs_and_entropy, token_logprobs
    from rollouts.training.algorithms.losses import cross_entropy, entropy_bonus, importance, ppo_clip, reinforce
    from rollouts.training.algorithms.recipes import GRPO, IS, PPO, REINFORCE, SFT

__all__ = [
    "GRPO",
    "IS",
    "PPO",
    "REINFORCE",
    "SFT",
    "Algorithm",
    "Term",
    "aggregate",
    "algorithm_settings",
    "as_algorithm",
    "bind_algorithm",
    "check_needs",
    "cross_entropy",
    "entropy_bonus",
    "group_advantages",
    "group_mean",
    "group_norm",
    "importance",
    "logprobs_and_entropy",
    "needs",
    "ppo_clip",
    "reinforce",
    "token_logprobs",
]

_HOMES = {
    "recipes": ("GRPO", "IS", "PPO", "REINFORCE", "SFT"),
    "algorithm": ("Algorithm", "Term", "algorithm_settings", "as_algorithm", "bind_algorithm", "check_needs", "needs"),
    "aggregation": ("aggregate",),
    "advantages": ("group_advantages", "group_mean", "group_norm"),
    "losses": ("cross_entropy", "entropy_bonus", "importance", "ppo_clip", "reinforce"),
    "logprobs": ("logprobs_and_entropy", "token_logprobs"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__getattr__, __dir__ = lazy_face(__name__, _HOME_OF)
