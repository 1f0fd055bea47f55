"""Advantages and losses of primitives give the numbers of independent formulas, written out here."""

from __future__ import annotations

import math

import pytest
import torch

from rollouts.errors import ConfigError, SignatureError, TrainingError
from rollouts.primitives import (
    Generation,
    Rollout,
    compute_dapo_loss,
    compute_dapo_pairs,
    compute_grpo_advantages,
    compute_grpo_loss,
    compute_loss_by_algorithm,
    compute_ppo_advantages,
    compute_ppo_loss,
    create_algorithm_config,
    create_batch,
)
from rollouts.training.algorithms import recipes
from rollouts.training.algorithms.algorithm import Algorithm

LENGTHS, REWARDS = [2, 1, 3, 2], [1.0, 0.0, 0.25, None]


def batch_of(rewards=REWARDS, lengths=LENGTHS, prompts=("a", "a", "b", "b"), *, reference=True):
    """Rollouts with made-up logprobs: of the sampler, of the policy (with gradient) and of the reference."""
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for prompt, reward, length in zip(prompts, rewards, lengths, strict=True):
        old, ref = (-torch.rand(2, length, generator=generator)).tolist()
        reply = Generation("x", list(range(length)), old, prompt_tokens=[1])
        rollouts.append(Rollout(prompt, reply, reward, ref_logprobs=ref if reference else None))
    batch = create_batch(None, rollouts)
    noise = torch.randn(len(batch.mask), generator=generator) * 0.3
    return batch._replace(logprobs=(batch.old_logprobs + noise).requires_grad_(), entropy=torch.rand(len(batch.mask)))


def test_a_group_is_compared_with_itself_only():
    batch = batch_of()
    std = math.sqrt(0.5)
    expected = [0.5 / (std + 1e-4), -0.5 / (std + 1e-4), 0.0, 0.0]  # one judged rollout has nothing to compare with
    assert compute_grpo_advantages(batch).tolist() == pytest.approx(expected)
    assert batch.mask.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]  # nothing judged the last rollout
    numbered = [each._replace(group_index=7) for each in batch.rollouts]
    own = compute_grpo_advantages(create_batch(None, numbered), advantage_fn=lambda rewards: rewards - rewards.mean())
    assert own.tolist() == pytest.approx([1 - 1.25 / 3, -1.25 / 3, 0.25 - 1.25 / 3, 0.0])


def test_the_grpo_loss_is_the_clipped_surrogate_and_the_kl():
    batch, advantages = batch_of(), [1.0, -2.0, 0.5, 9.0]
    loss = compute_grpo_loss(batch, advantages, clip_low=0.1, clip_high=0.2, kl_coef=0.3)
    values = []
    for at in range(6):  # the trained ids
        policy, old, ref = (float(x[at]) for x in (batch.logprobs.detach(), batch.old_logprobs, batch.ref_logprobs))
        advantage, ratio = advantages[int(batch.rollout_index[at])], math.exp(policy - old)
        surrogate = min(ratio * advantage, min(max(ratio, 0.9), 1.2) * advantage)
        kl = ratio * (math.exp(ref - policy) - 1 - (ref - policy))
        values.append(-surrogate + 0.3 * kl)
    assert loss.item() == pytest.approx(sum(values) / 6, rel=1e-5)
    loss.backward()
    assert batch.logprobs.grad[6:].tolist() == [0.0, 0.0] and batch.logprobs.grad[:6].abs().sum() > 0


def test_own_losses_and_own_kls():
    batch = batch_of()
    own = compute_grpo_loss(batch, [1.0] * 4, loss_fn=lambda logprobs, mask: -logprobs * mask)
    assert own.item() == pytest.approx(-batch.logprobs[:6].mean().item())
    plain = compute_grpo_loss(batch, [0.0] * 4, kl_coef=2.0, kl_fn=lambda lp, ref_lp: lp - ref_lp)
    assert plain.item() == pytest.approx(2 * (batch.logprobs - batch.ref_logprobs)[:6].mean().item(), rel=1e-5)
    one = compute_grpo_loss(batch, [0.0] * 4, kl_coef=2.0, kl_fn=lambda lp, ref_lp: 0.5)
    assert one.item() == pytest.approx(1.0)
    per_token = torch.arange(8.0)
    loss = compute_grpo_loss(batch, per_token, loss_fn=lambda logprobs, advantages: 0 * logprobs + advantages)
    assert loss.item() == pytest.approx(15 / 6)


def test_pairs_and_their_loss():
    batch = batch_of([1.0, 0.0, 0.5, 2.0], prompts="aaaa")
    assert compute_dapo_pairs(batch) == [(3, 1)]
    assert compute_dapo_pairs(batch_of([1.0] * 4)) == []
    assert compute_dapo_pairs(
        batch_of([0.0, None, 1.0, 2.0]), pair_selector=lambda rewards: [(0, 1)] * (len(rewards) > 1)
    ) == [(2, 3)]
    margins = (batch.logprobs - batch.ref_logprobs).detach()
    sums = [float(margins[batch.rollout_index == rollout].sum()) for rollout in range(4)]
    expected = [math.log(1 + math.exp(-0.5 * (sums[a] - sums[b]))) for a, b in ((3, 1), (0, 1))]
    loss = compute_dapo_loss(batch, [(3, 1), (0, 1)], beta=0.5)
    assert loss.item() == pytest.approx(sum(expected) / 2, rel=1e-5)
    loss.backward()
    signs = batch.logprobs.grad.sign()
    assert [set(signs[batch.rollout_index == rollout].tolist()) for rollout in range(4)] == [{-1}, {1}, {0}, {-1}]
    assert compute_dapo_loss(batch, []).item() == 0.0
    by_name = compute_loss_by_algorithm(batch, create_algorithm_config("dapo", {"beta": 0.5}))
    assert by_name.item() == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("ids", [1, 2, 3])
def test_the_better_reply_gains_whatever_the_number_of_ids_is(ids):
    """With four replies of two ids, the pairs have as many ids as the batch has rollouts."""
    batch = batch_of([0.0, 0.25, 0.5, 1.0], [ids] * 4, "aaaa")
    margins = (batch.logprobs - batch.ref_logprobs).detach().reshape(4, ids).sum(1)
    loss = compute_loss_by_algorithm(batch, create_algorithm_config("dapo", {"beta": 1.0}))
    assert loss.item() == pytest.approx(math.log(1 + math.exp(margins[0] - margins[3])), rel=1e-5)
    loss.backward()
    signs = batch.logprobs.grad.reshape(4, ids).sign()
    assert signs.tolist() == [[1] * ids, [0] * ids, [0] * ids, [-1] * ids]


def test_gae_and_the_value_function():
    batch, gamma, lam = batch_of(), 0.9, 0.8
    value = torch.tensor([0.1, 0.4, -0.2, 0.3, 0.2, 0.7, 5.0, 5.0], requires_grad=True)
    known = value.tolist()
    found = compute_ppo_advantages(batch, value_fn=lambda batch: value, gamma=gamma, lam=lam, whiten=False)
    expected = [0.0] * 8
    for start, length, reward in ((0, 2, 1.0), (2, 1, 0.0), (3, 3, 0.25)):
        after, later = 0.0, 0.0
        for at in reversed(range(start, start + length)):
            delta = (reward if at == start + length - 1 else 0.0) + gamma * after - known[at]
            later = expected[at] = delta + gamma * lam * later
            after = known[at]
    assert found.advantages.tolist() == pytest.approx(expected, abs=1e-6)
    returns = [each + known[at] if at < 6 else 0.0 for at, each in enumerate(expected)]
    assert found.returns.tolist() == pytest.approx(returns, abs=1e-6) and not found.returns.requires_grad
    alone = compute_ppo_loss(batch, found)
    both = compute_ppo_loss(batch, found, value_fn=lambda batch: value, value_coef=2.0)
    error = sum((known[at] - returns[at]) ** 2 / 2 for at in range(6)) / 6
    assert both.item() - alone.item() == pytest.approx(2 * error, rel=1e-4)
    both.backward()
    assert value.grad[:6].abs().sum() > 0


@pytest.mark.parametrize(
    "name", sorted(key.lower() for key, each in vars(recipes).items() if isinstance(each, Algorithm))
)
def test_every_algorithm_of_the_engine_has_a_loss(name):
    settings = {"length": 8} if name == "dr_grpo" else {}
    config = create_algorithm_config(name, settings)
    if name == "opd":
        with pytest.raises(SignatureError, match="teacher_logprobs"):
            compute_loss_by_algorithm(batch_of(), config)
        return
    batch = batch_of()
    loss = compute_loss_by_algorithm(batch, config)
    loss.backward()
    assert loss.dim() == 0 and batch.logprobs.grad[:6].abs().sum() > 0
    assert batch.logprobs.grad[6:].abs().sum() == 0


def test_a_selector_chooses_what_is_trained():
    batch = batch_of()
    compute_loss_by_algorithm(batch, create_algorithm_config("rft", {"threshold": 0.25})).backward()
    assert (batch.logprobs.grad != 0).tolist() == [True, True, False, True, True, True, False, False]


def test_an_algorithm_can_be_an_object_and_its_settings_reach_each_part():
    config = create_algorithm_config(recipes.GRPO._replace(aggregation="rollout_mean"), {"eps": 1.0, "clip_high": 0.4})
    assert config.name == "ppo_clip" and config.algorithm.terms[0].function.keywords == {"clip_high": 0.4}
    advantages = compute_grpo_advantages(batch_of(), advantage_fn=config.algorithm.advantage)
    assert advantages[0].item() == pytest.approx(0.5 / (math.sqrt(0.5) + 1.0))


def refusals():
    batch = batch_of(reference=False)
    bare = batch._replace(logprobs=None)
    yield lambda: create_algorithm_config("grop"), ConfigError, "no built-in algorithm 'grop'; did you mean grpo"
    yield lambda: create_algorithm_config("grpo", {"beta": 1.0}), ConfigError, "has no setting 'beta'"
    yield lambda: create_algorithm_config("grpo", {"kl_coef": -1.0}), ConfigError, "kl_coef is -1.0; expected"
    yield lambda: create_algorithm_config("grpo", {"kl_coef": "x"}), ConfigError, "kl_coef is 'x'; expected"
    yield lambda: create_algorithm_config("grpo", ["kl_coef"]), ConfigError, "expected a dict"
    wrong_kl = create_algorithm_config("grpo", {"kl_coef": 0.1}, kl_fn=lambda lp, ref_lp: lp[:3])
    yield lambda: compute_loss_by_algorithm(batch_of(), wrong_kl), TrainingError, r"kl_fn <lambda> returned .*\[8\]"
    yield lambda: create_algorithm_config(recipes.DAPO), ConfigError, "shaping and filters"
    yield lambda: compute_grpo_loss(bare, [1.0] * 4), TrainingError, r"create_batch\(model, rollouts\)"
    yield lambda: compute_grpo_loss(batch, [1.0] * 3), TrainingError, r"shape \[3\]; expected \[4\]"
    yield lambda: compute_grpo_loss(batch, [1.0] * 4, kl_coef=0.1), TrainingError, "needs ref_logprobs.*ref_model="
    yield lambda: compute_grpo_loss(batch, [1.0] * 4, loss_fn=lambda logprobs: logprobs.mean()), TrainingError, "scalar"
    yield (
        lambda: compute_grpo_loss(batch, [math.inf] * 4, loss_fn=lambda logprobs, advantages: advantages - advantages),
        TrainingError,
        "is NaN",
    )
    yield (
        lambda: compute_ppo_advantages(batch, value_fn=lambda batch: torch.zeros(3)),
        TrainingError,
        r"\[8\], one value",
    )
    yield lambda: compute_dapo_pairs(batch, pair_selector=lambda rewards: [(0, 9)]), TrainingError, "pair"


@pytest.mark.parametrize(("call", "error", "words"), [pytest.param(*each, id=each[2][:20]) for each in refusals()])
def test_bad_input_is_one_clear_error(call, error, words):
    with pytest.raises(error, match=words):
        call()
