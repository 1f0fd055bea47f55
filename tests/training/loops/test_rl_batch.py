"""From groups to batches: mixing, shaping, selection, pairs, advantages of tokens, and forward passes before them."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import trio
from backend_fakes import BackendFields
from rollouts_notes.user_functions import sample_episode

from rollouts.errors import TrainingError
from rollouts.models.futures import ImmediateTrainFuture
from rollouts.training.algorithms.advantages import group_norm
from rollouts.training.algorithms.algorithm import KL, Algorithm, Stage, Term
from rollouts.training.algorithms.kl import k1_reward, rk3_loss
from rollouts.training.algorithms.losses import ppo_clip
from rollouts.training.algorithms.recipes import DAPO, DPO, GRPO, OPD, PPO, REINFORCE_PP, RFT
from rollouts.training.algorithms.rewards import minimum
from rollouts.training.algorithms.selection import reward_at_least
from rollouts.training.algorithms.token_advantages import gae
from rollouts.training.batches import ForwardOutput
from rollouts.training.loops.rl_batch import (
    RLSettings,
    complete_batch,
    estimate_advantages,
    prepare_rl_batch,
    rollout_advantages,
)
from rollouts.training.rollout_gen.groups import Group
from rollouts.training.rollout_gen.steps import rollout_metrics
from rollouts.training.samples import episode_samples
from rollouts.types import Episode, Message, Score, Segment, Status, Task, Trajectory

TASK = Task("question")
CONFIG = RLSettings(1, response_tokens_max=8)


def episode(order, score, *, status=Status.COMPLETED, sampled=2):
    """Two prompt tokens, one sampled, a tool's token, and the other sampled ones."""
    mask = [0.0, 0.0, 1.0, 0.0] + [1.0] * (sampled - 1)
    streams = [1.0 if live else 0.0 for live in mask]
    segment = Segment(
        list(range(1, len(mask) + 1)), mask, [-value for value in streams], [0 if live else -1 for live in mask]
    )
    trajectory = Trajectory(TASK, [*TASK.messages, Message("assistant", "x")], [segment], status)
    return Episode(order, TASK, [trajectory], score if isinstance(score, Score) else Score(score), {})


def groups_of(*rewards, **settings):
    return [
        Group(number, TASK, tuple(episode((number, place), score, **settings) for place, score in enumerate(scores)))
        for number, scores in enumerate(rewards)
    ]


def live(row, name):
    return [value for value, weight in zip(getattr(row, name), row.loss_mask, strict=True) if weight]


def test_group_advantages_reach_live_tokens_only():
    prepared = prepare_rl_batch(groups_of([1.0, 0.0], [1.0, 1.0]), GRPO, CONFIG, 0)
    assert prepared.advantages[0] == -prepared.advantages[1] > 0 and prepared.advantages[2:] == [0.0, 0.0]
    row = prepared.batch.rows[0]
    assert row.advantages == [0.0, 0.0, prepared.advantages[0], 0.0, prepared.advantages[0]]
    assert prepared.batch.anchor == "sampler" and prepared.batch.algorithm == "main"


def test_mixed_and_shaped_rewards_are_what_the_advantage_sees():
    scores = [Score(1.0, {"right": 1.0, "short": 0.0}, "", {"right": 1.0, "short": 1.0}),
              Score(1.0, {"right": 0.5, "short": 0.5}, "", {"right": 1.0, "short": 1.0})]  # fmt: skip
    assert prepare_rl_batch(groups_of(scores), GRPO, CONFIG, 0).advantages == [0.0, 0.0], "the sums are the same"
    mixed = prepare_rl_batch(groups_of(scores), GRPO._replace(mix=minimum), CONFIG, 0)
    assert mixed.advantages[1] > 0 > mixed.advantages[0] and mixed.batch.rewards == [0.0, 0.5]
    shaped = prepare_rl_batch([groups_of([1.0])[0]._replace(
        episodes=(episode((0, 0), 1.0, sampled=2), episode((0, 1), 1.0, sampled=8)))], DAPO, CONFIG, 0)  # fmt: skip
    assert shaped.batch.rewards == [1.0, 0.0], "8 of 8 tokens: all of the buffer is used up"


def test_selected_rollouts_are_trained_and_truncated_ones_are_not():
    found = prepare_rl_batch(groups_of([1.0, 0.0, 1.0]), RFT, CONFIG, 0).batch
    assert [any(row.loss_mask) for row in found.rows] == [True, False, True] and found.denominator == 4
    assert found.rewards == [1.0, 0.0, 1.0]
    truncated = groups_of([1.0, 0.0], status=Status.TRUNCATED)
    assert prepare_rl_batch(truncated, RFT, CONFIG, 0).batch.denominator == 0
    assert prepare_rl_batch(truncated, GRPO, CONFIG, 0).advantages[0] > 0, "it stays in the baseline"


def test_pairs_come_from_groups_with_a_difference():
    batch = prepare_rl_batch(groups_of([0.0, 1.0, 0.5], [1.0, 1.0, 1.0]), DPO, CONFIG, 0).batch
    assert [(row.rollout_index, row.advantages[2]) for row in batch.rows] == [(1, 1.0), (0, -1.0)]
    assert batch.unit == "pair" and batch.denominator == 1
    nothing = prepare_rl_batch(groups_of([1.0, 1.0]), DPO, CONFIG, 0).batch
    assert not nothing.rows and nothing.denominator == 0


def test_a_correction_anchors_at_the_policy_unless_the_sampler_is_the_trainer():
    algorithm = GRPO._replace(correction=lambda old_logprobs, rollout_logprobs: old_logprobs)
    assert prepare_rl_batch(groups_of([1.0, 0.0]), algorithm, CONFIG, 0).batch.anchor == "current"
    inside = Stage(0, "main", algorithm, correction_auto=True).inside().algorithm
    assert prepare_rl_batch(groups_of([1.0, 0.0]), inside, CONFIG, 0).batch.anchor == "sampler"
    asked_for = Stage(0, "main", algorithm).inside().algorithm
    assert asked_for.correction is algorithm.correction


class Backend(BackendFields):
    """Answers `forward` with constants and keeps what was asked."""

    def __init__(self):
        self.asked = []

    def forward(self, batch, needs, *, only_live=False):
        self.asked.append((needs, only_live))
        streams = [[float(place) for place in range(len(row.tokens))] for row in batch.rows]
        return ImmediateTrainFuture(ForwardOutput(**dict.fromkeys(needs, streams)))


def complete(groups, algorithm, **settings):
    backend = Backend()
    batch = prepare_rl_batch(groups, algorithm, CONFIG, 0).batch
    trio.run(lambda: complete_batch(backend, batch, algorithm, **settings))
    return batch, backend.asked


def test_only_what_is_named_is_asked_for():
    groups = groups_of([1.0, 0.0])
    assert complete(groups, GRPO)[1] == []
    batch, asked = complete(groups, GRPO._replace(kl=KL(rk3_loss)))
    assert asked == [(("ref_logprobs",), True)] and batch.rows[0].ref_logprobs == [0.0, 1.0, 2.0, 3.0, 4.0]
    batch, asked = complete(groups, PPO)
    assert asked == [(("values",), True)] and batch.rows[0].old_values is not None and batch.rows[0].returns is not None
    corrected = GRPO._replace(correction=lambda old_logprobs, rollout_logprobs: old_logprobs)
    assert complete(groups, corrected)[1] == []
    batch, asked = complete(groups, corrected, minibatches=2)
    assert asked == [(("logprobs",), True)] and batch.rows[0].old_logprobs is not None
    assert complete([], PPO)[1] == []


def test_a_kl_without_gradient_comes_off_the_advantages_of_live_tokens_and_of_those_before():
    algorithm = GRPO._replace(kl=KL(k1_reward, 0.5))
    groups = groups_of([1.0, 0.0])
    plain = prepare_rl_batch(groups, GRPO, CONFIG, 0).batch
    batch, _ = complete(groups, algorithm)
    for row, before in zip(batch.rows, plain.rows, strict=True):
        penalty = [0.5 * (logprob - ref) for logprob, ref in zip(row.rollout_logprobs, row.ref_logprobs, strict=True)]
        penalty = [value if weight else 0.0 for value, weight in zip(penalty, row.loss_mask, strict=True)]
        expected = [
            a - sum(penalty[place:]) if weight else 0.0
            for place, (a, weight) in enumerate(zip(before.advantages, row.loss_mask, strict=True))
        ]
        assert row.advantages == pytest.approx(expected)
    batch = prepare_rl_batch(groups, algorithm, CONFIG, 0).batch
    batch.kl_coefficient = 0.0
    trio.run(lambda: complete_batch(Backend(), batch, algorithm))
    assert batch.rows[0].advantages == plain.rows[0].advantages, "the steered coefficient is the one that counts"


def unsampled(groups, *numbers):
    """The groups, as a `generate_fn` makes them; the samples of these rollouts know no logprobs."""
    found = []
    for group in groups:
        samples = [episode_samples(each, 0, 0)[0] for each in group.episodes]
        for number in numbers:
            samples[number].rollout_log_probs = samples[number].policy_versions = None
        found.append(group._replace(samples=tuple(samples)))
    return found


def test_a_row_without_the_samplers_logprobs_is_anchored_at_the_policy():
    groups = unsampled(groups_of([1.0, 0.0]), 0)
    batch, asked = complete(groups, GRPO)
    assert asked == [] and [row.rollout_logprobs is None for row in batch.rows] == [True, False]
    batch, asked = complete(groups, GRPO, minibatches=2)
    assert asked == [(("logprobs",), True)], "the later steps need the policy as it was"
    assert batch.rows[0].old_logprobs == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert batch.rows[1].old_logprobs == batch.rows[1].rollout_logprobs, "the sampler of this one is known"
    batch, asked = complete(groups, OPD)
    assert asked == [(("teacher_logprobs", "logprobs"), True)]
    assert live(batch.rows[0], "advantages") == [0.0, 0.0], "the teacher says what the policy does"
    assert live(batch.rows[1], "advantages") == [2.0 - -1.0, 4.0 - -1.0]
    batch, asked = complete(groups, GRPO._replace(kl=KL(k1_reward, 0.5)))
    assert asked == [(("ref_logprobs", "logprobs"), True)]
    assert live(batch.rows[0], "advantages")[0] == prepare_rl_batch(groups, GRPO, CONFIG, 0).advantages[0]


def test_a_row_that_is_not_live_needs_no_logprobs():
    (group,) = unsampled(groups_of([1.0, 0.0, 0.5]), 0)
    group = group._replace(episodes=(episode((0, 0), 1.0, status=Status.TRUNCATED), *group.episodes[1:]))
    batch, asked = complete([group], REINFORCE_PP)
    assert asked == [] and batch.rows[0].rollout_logprobs is None and not any(batch.rows[0].advantages)
    assert live(batch.rows[1], "advantages")[0] < 0 < live(batch.rows[2], "advantages")[0]


def test_rollouts_of_a_function_without_logprobs_are_selected_and_compared():
    groups = unsampled(groups_of([1.0, 0.0]), 0, 1)
    groups = [g._replace(episodes=tuple(sample_episode(s, TASK, (0, 0)) for s in g.samples)) for g in groups]
    assert [any(row.loss_mask) for row in prepare_rl_batch(groups, RFT, CONFIG, 0).batch.rows] == [True, False]
    assert [row.pair_index for row in prepare_rl_batch(groups, DPO, CONFIG, 0).batch.rows] == [0, 0]
    assert rollout_metrics(groups)["rollout/tokens"] == 2.0


def test_a_batch_with_nothing_live_is_a_skipped_step():
    for algorithm in (GRPO._replace(kl=KL(k1_reward)), PPO, REINFORCE_PP, OPD):
        batch, asked = complete(groups_of([1.0, 0.0], status=Status.TRUNCATED), algorithm)
        assert asked == [] and batch.denominator == 0.0


def test_a_kl_estimator_that_raises_is_named():
    def broken(old_logprobs, ref_logprobs):
        raise RuntimeError("no")

    with pytest.raises(TrainingError, match="KL estimator broken raised RuntimeError: no"):
        complete(groups_of([1.0, 0.0]), GRPO._replace(kl=KL(broken)))


def test_advantages_of_the_whole_batch():
    batch, _ = complete(groups_of([1.0, 0.0], [1.0, 1.0]), REINFORCE_PP)
    values = [value for row in batch.rows for value in live(row, "advantages")]
    assert sum(values) == pytest.approx(0.0, abs=1e-6) and math.isclose(torch.tensor(values).std(), 1.0, rel_tol=0.3)
    assert all(
        a == 0.0 for row in batch.rows for a, weight in zip(row.advantages, row.loss_mask, strict=True) if not weight
    )
    assert rollout_advantages(batch, 4)[1] == pytest.approx(min(values))


def test_a_kl_penalty_flows_into_returns_where_the_estimator_names_it():
    """gamma 1: every token of a rollout gets the penalties of those after it too."""
    plain, _ = complete(groups_of([1.0, 0.0]), REINFORCE_PP)
    with_kl, _ = complete(groups_of([1.0, 0.0]), REINFORCE_PP._replace(kl=KL(k1_reward, 0.5)))
    assert len(set(live(plain.rows[0], "advantages"))) == 1
    assert len(set(live(with_kl.rows[0], "advantages"))) == 2


def test_distillation_needs_no_reward_spread():
    batch, asked = complete(groups_of([1.0, 1.0]), OPD)
    assert asked == [(("teacher_logprobs",), True)]
    assert live(batch.rows[0], "advantages") == [2.0 - -1.0, 4.0 - -1.0]


def test_an_unjudged_rollout_is_neither_in_a_baseline_nor_selected():
    groups = groups_of([1.0, None, 0.0])
    prepared = prepare_rl_batch(groups, GRPO, CONFIG, 0)
    assert prepared.advantages[1] == 0.0 and prepared.advantages[0] == -prepared.advantages[2]
    assert math.isnan(prepared.batch.rewards[1])
    everything = Algorithm(group_norm, "token_mean", (Term(ppo_clip),), select=lambda rewards: rewards > -1)
    assert [any(r.loss_mask) for r in prepare_rl_batch(groups, everything, CONFIG, 0).batch.rows] == [True, False, True]
    assert reward_at_least(torch.tensor([0.5, 1.0])).tolist() == [False, True]
    estimate_advantages(prepared.batch, GRPO)
    assert rollout_advantages(prepared.batch, 3) == pytest.approx(prepared.advantages)


def two_turns(order, score):
    """Two turns of two tokens each, with a tool's token between them."""
    mask = [0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    segment = Segment(list(range(1, 8)), mask, [-live for live in mask], [int(live) - 1 for live in mask])
    segment.turns = [(0, 2), (1, 5)]
    said = [Message("assistant", "x"), Message("user", "y"), Message("assistant", "z")]
    trajectory = Trajectory(TASK, [*TASK.messages, *said], [segment], Status.COMPLETED)
    return Episode(order, TASK, [trajectory], score, {})


def halved(rewards):
    return rewards / 2


def test_rewards_by_turn_reach_the_last_tokens_of_their_turns():
    """The rewards to go of gae with lam 1, before the critic's values. A shaping changes the last turn's reward."""
    advantage = functools.partial(gae, lam=1.0, whiten=False)
    algorithm = PPO._replace(advantage=advantage)
    scores = [Score(5.0, turns=[1.0, 4.0]), Score(2.0), Score(None)]
    group = Group(0, TASK, tuple(two_turns((0, place), score) for place, score in enumerate(scores)))
    for shaping, first, second in (((), [5.0, 5.0, 4.0, 4.0], [2.0] * 4), ((halved,), [2.5, 2.5, 1.5, 1.5], [1.0] * 4)):
        batch = prepare_rl_batch([group], algorithm._replace(shaping=shaping), CONFIG, 0).batch
        for row in batch.rows:
            row.old_values = [0.25] * len(row.tokens)
        estimate_advantages(batch, algorithm)
        assert [live(row, "returns") for row in batch.rows] == [first, second, []]
        assert live(batch.rows[0], "advantages") == [each - 0.25 for each in first]
    assert prepare_rl_batch([group], GRPO, CONFIG, 0).batch.turn_rewards == []  # no other advantage gets them
