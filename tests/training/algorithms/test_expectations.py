"""Whole rollouts of different lengths, enumerated: the expectation of an algorithm's gradient against the true one.

The policy is a table: at first it ends the reply (0) or goes on (1), and then says 0 or 1. So there are three rollouts,
of one and two tokens.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from rollouts.training.algorithms.algorithm import KL
from rollouts.training.algorithms.calls import group_advantages
from rollouts.training.algorithms.kl import k1_reward
from rollouts.training.algorithms.objective import evaluate_objective
from rollouts.training.algorithms.recipes import RLOO
from rollouts.training.batching import make_batch
from rollouts.training.loops.rl_batch import estimate_advantages
from rollouts.types import Sample

ROLLOUTS = {(0,): 0.3, (1, 0): 1.0, (1, 1): -0.5}  # and their rewards
POLICY, REF = (torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (0, 1))


def logprobs_of(table, rollout):
    return torch.stack([table.log_softmax(-1)[place, action] for place, action in enumerate(rollout)])


def true_gradient(coefficient=0.0):
    """Of E[R] - coefficient KL(policy || ref), both over whole rollouts."""
    table = POLICY.clone().requires_grad_()
    total = 0.0
    for rollout, reward in ROLLOUTS.items():
        own, ref = logprobs_of(table, rollout).sum(), logprobs_of(REF, rollout).sum()
        total = total + own.exp() * (reward - coefficient * (own - ref))
    total.backward()
    return table.grad


def expected_gradient(algorithm):
    """Minus the gradient of the objective, over all pairs of rollouts that the policy may sample."""
    table = POLICY.clone().requires_grad_()
    total = 0.0
    for chosen in itertools.product(ROLLOUTS, repeat=2):
        known = [logprobs_of(POLICY, rollout) for rollout in chosen]
        samples = [
            Sample(
                tokens=[7, *rollout],
                loss_mask=[0.0] + [1.0] * len(rollout),
                reward=ROLLOUTS[rollout],
                rollout_log_probs=[0.0, *own.tolist()],
                policy_versions=[-1] + [0] * len(rollout),
                group_index=0,
                rollout_index=number,
            )
            for number, (rollout, own) in enumerate(zip(chosen, known, strict=True))
        ]
        advantages = group_advantages(algorithm.advantage, [sample.reward for sample in samples])
        batch = make_batch(samples, advantages, aggregation=algorithm.aggregation, step=0)
        for row, rollout in zip(batch.rows, chosen, strict=True):
            row.ref_logprobs = [0.0, *logprobs_of(REF, rollout).tolist()]
        estimate_advantages(batch, algorithm)
        live = {
            name: torch.tensor([v for row in batch.rows for v in getattr(row, name)[1:]], dtype=torch.float64)
            for name in ("advantages", "weights")
        }
        logprobs = torch.cat([logprobs_of(table, rollout) for rollout in chosen])
        found = evaluate_objective(algorithm, {"logprobs": logprobs, **live}, torch.ones(len(logprobs)))
        objective = (found.values * live["weights"]).sum() / batch.denominator
        total = total - torch.cat(known).sum().exp() * objective
    total.backward()
    return table.grad


def test_rloo_is_the_gradient_of_the_expected_reward():
    torch.testing.assert_close(expected_gradient(RLOO), true_gradient())
    with pytest.raises(AssertionError):  # a mean over a rollout's tokens is not
        torch.testing.assert_close(expected_gradient(RLOO._replace(aggregation="rollout_mean")), true_gradient())


@pytest.mark.parametrize("coefficient", [0.1, 2.0])
def test_k1_reward_with_group_advantages_is_the_gradient_of_the_kl_of_whole_rollouts(coefficient):
    algorithm = RLOO._replace(kl=KL(k1_reward, coefficient))
    torch.testing.assert_close(expected_gradient(algorithm), true_gradient(coefficient))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(expected_gradient(algorithm), true_gradient())
