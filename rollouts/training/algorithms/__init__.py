"""Algorithms: pure functions on tensors, put together in NamedTuples.

    algorithm recipes schedule     the composition (Term, KL, Algorithm); the named ones; another from a step on
    needs evaluate                 what a composition asks of a run; its value on tensors
    losses kl corrections          one value a token; KL to the reference; weights of what another engine sampled
    mixers shaping                 rewards before the advantage
    advantages token_advantages    of one group; of the whole batch (GAE, REINFORCE++)
    selectors pairings             which rollouts are trained on; which are compared
    references                     how the reference policy follows the policy
    aggregation                    per-token weights u and the denominator D
    logprobs packing               logprobs and entropy in chunks; rows in bins

Nothing is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.training.algorithms.advantages import group_advantages
    from rollouts.training.algorithms.aggregation import TokenWeights, aggregate
    from rollouts.training.algorithms.algorithm import (
        KL,
        Algorithm,
        Term,
        algorithm_settings,
        as_algorithm,
        bind,
        bind_algorithm,
    )
    from rollouts.training.algorithms.logprobs import logprobs_and_entropy, token_logprobs
    from rollouts.training.algorithms.needs import check_composition, check_needs
    from rollouts.training.algorithms.recipes import (
        CISPO,
        DAPO,
        DPO,
        DR_GRPO,
        GRPO,
        GSPO,
        IS,
        OPD,
        PPO,
        REINFORCE,
        REINFORCE_PP,
        RFT,
        RLOO,
        SFT,
    )
    from rollouts.training.algorithms.schedule import Stage, stage_at

__all__ = [
    "CISPO",
    "DAPO",
    "DPO",
    "DR_GRPO",
    "GRPO",
    "GSPO",
    "IS",
    "KL",
    "OPD",
    "PPO",
    "REINFORCE",
    "REINFORCE_PP",
    "RFT",
    "RLOO",
    "SFT",
    "Algorithm",
    "Stage",
    "Term",
    "TokenWeights",
    "aggregate",
    "algorithm_settings",
    "as_algorithm",
    "bind",
    "bind_algorithm",
    "check_composition",
    "check_needs",
    "group_advantages",
    "logprobs_and_entropy",
    "stage_at",
    "token_logprobs",
]

_HOMES = {
    "advantages": ("group_advantages",),
    "aggregation": ("TokenWeights", "aggregate"),
    "algorithm": ("KL", "Algorithm", "Term", "algorithm_settings", "as_algorithm", "bind", "bind_algorithm"),
    "logprobs": ("logprobs_and_entropy", "token_logprobs"),
    "needs": ("check_composition", "check_needs"),
    "recipes": (
        "CISPO",
        "DAPO",
        "DPO",
        "DR_GRPO",
        "GRPO",
        "GSPO",
        "IS",
        "OPD",
        "PPO",
        "REINFORCE",
        "REINFORCE_PP",
        "RFT",
        "RLOO",
        "SFT",
    ),
    "schedule": ("Stage", "stage_at"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__getattr__, __dir__ = lazy_face(__name__, _HOME_OF)
