"""Algorithms: pure functions on tensors, composed in NamedTuples.

    algorithm recipes              the composition (Term, KL, Algorithm) and what it needs; the named algorithms
    checks objective               checks before a model loads; an algorithm's value on tensors
    losses kl                      one value per token; KL to the reference
    corrections                    what a ratio compares with; weights for tokens of another sampler
    rewards                        mixers and shapings, before the advantage
    advantages token_advantages    of one group; of the whole batch (GAE, REINFORCE++)
    selection                      which rollouts are trained; which are compared
    calls                          calls of an author's functions, with checks
    aggregation                    the weights u per token, and the denominator D
    logprobs                       logprobs and entropy in chunks

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.plugins.signature import bind as bind
    from rollouts.training.algorithms.aggregation import TokenWeights as TokenWeights
    from rollouts.training.algorithms.aggregation import aggregate as aggregate
    from rollouts.training.algorithms.algorithm import KL as KL
    from rollouts.training.algorithms.algorithm import Algorithm as Algorithm
    from rollouts.training.algorithms.algorithm import Stage as Stage
    from rollouts.training.algorithms.algorithm import Term as Term
    from rollouts.training.algorithms.algorithm import algorithm_settings as algorithm_settings
    from rollouts.training.algorithms.algorithm import as_algorithm as as_algorithm
    from rollouts.training.algorithms.algorithm import bind_algorithm as bind_algorithm
    from rollouts.training.algorithms.algorithm import stage_at as stage_at
    from rollouts.training.algorithms.calls import group_advantages as group_advantages
    from rollouts.training.algorithms.checks import check_composition as check_composition
    from rollouts.training.algorithms.checks import check_needs as check_needs
    from rollouts.training.algorithms.logprobs import logprobs_and_entropy as logprobs_and_entropy
    from rollouts.training.algorithms.logprobs import token_logprobs as token_logprobs
    from rollouts.training.algorithms.recipes import CISPO as CISPO
    from rollouts.training.algorithms.recipes import DAPO as DAPO
    from rollouts.training.algorithms.recipes import DPO as DPO
    from rollouts.training.algorithms.recipes import DR_GRPO as DR_GRPO
    from rollouts.training.algorithms.recipes import GRPO as GRPO
    from rollouts.training.algorithms.recipes import GSPO as GSPO
    from rollouts.training.algorithms.recipes import IS as IS
    from rollouts.training.algorithms.recipes import OPD as OPD
    from rollouts.training.algorithms.recipes import PPO as PPO
    from rollouts.training.algorithms.recipes import REINFORCE as REINFORCE
    from rollouts.training.algorithms.recipes import REINFORCE_PP as REINFORCE_PP
    from rollouts.training.algorithms.recipes import RFT as RFT
    from rollouts.training.algorithms.recipes import RLOO as RLOO
    from rollouts.training.algorithms.recipes import SFT as SFT

__getattr__, __dir__ = lazy_face(__name__)
