"""Compositions of algorithms: what they need, their settings, and errors that name a wrong loss."""

from __future__ import annotations

import functools

import pytest
import torch

from rollouts.errors import ConfigError, SignatureError, TrainingError
from rollouts.training.algorithms import algorithm as room
from rollouts.training.algorithms import checks
from rollouts.training.algorithms.advantages import group_mean, group_norm
from rollouts.training.algorithms.aggregation import aggregate
from rollouts.training.algorithms.algorithm import KL, Algorithm, Term
from rollouts.training.algorithms.corrections import importance_weights
from rollouts.training.algorithms.kl import k1_reward, k2_loss, rk3_loss
from rollouts.training.algorithms.losses import entropy_bonus, ppo_clip
from rollouts.training.algorithms.objective import evaluate_objective as evaluate_algorithm
from rollouts.training.algorithms.recipes import DPO, GRPO, OPD, PPO, RFT, SFT
from rollouts.training.algorithms.selection import best_worst
from rollouts.training.algorithms.token_advantages import gae

ALWAYS = checks.available_names()


def test_needs_and_settings_of_compositions():
    both = Algorithm(group_mean, "token_mean", (Term(ppo_clip), Term(entropy_bonus, 0.01)))
    assert room.needs(both) == {"logprobs", "old_logprobs", "advantages", "entropy"}
    assert {"clip_low", "clip_high"} <= {setting.name for setting in room.algorithm_settings(both)}
    bound = room.bind_algorithm(both, {"clip_high": 0.28})
    assert room.setting_of(bound, "clip_high") == 0.28 and room.setting_of(bound, "clip_low") == 0.2
    assert room.setting_of(SFT, "clip_low") is None
    assert room.needs(bound) == room.needs(both)
    assert room.setting_of(both, "clip_high") == 0.2, "binding changes nothing in place"


def test_a_named_term_has_a_coefficient_and_is_not_computed_at_0():
    assert "entropy" not in room.needs(GRPO)
    with_entropy = room.bind_algorithm(GRPO, {"entropy_coef": 0.01})
    assert "entropy" in room.needs(with_entropy) and with_entropy.terms[1].coefficient == 0.01
    (coefficient,) = (each for each in room.algorithm_settings(PPO) if each.name == "value_coef")
    assert coefficient.default == 0.5
    assert "values" not in room.needs(room.bind_algorithm(PPO, {"value_coef": 0.0}))


def test_settings_bound_in_a_recipe_are_its_defaults():
    composed = Algorithm(group_norm, "token_mean", (Term(functools.partial(ppo_clip, clip_high=0.28)),))
    defaults = {each.name: each.default for each in room.algorithm_settings(composed)}
    assert defaults["clip_high"] == 0.28 and defaults["clip_low"] == 0.2
    assert room.setting_of(room.bind_algorithm(composed, {"clip_low": 0.1}), "clip_high") == 0.28


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'clip_high'"):
        room.bind_algorithm(GRPO, {"clip_hig": 0.3})


def test_what_has_to_be_computed_before_the_loss():
    assert room.forward_needs(GRPO) == ()
    assert room.forward_needs(GRPO._replace(kl=KL(rk3_loss))) == ("ref_logprobs",)
    assert room.forward_needs(GRPO._replace(kl=KL(k1_reward))) == ("ref_logprobs",)
    assert room.forward_needs(PPO) == ("values",)
    assert room.forward_needs(OPD) == ("teacher_logprobs",)
    assert room.forward_needs(DPO) == ("ref_logprobs",)
    assert room.is_reward_placed(k1_reward) and not room.is_reward_placed(k2_loss)
    assert room.is_batch_advantage(gae) and not room.is_batch_advantage(group_norm)


def test_a_bare_loss_becomes_an_algorithm():
    def mine(logprobs, advantages):
        return -logprobs * advantages

    found = room.as_algorithm(mine)
    assert found.terms == (Term(mine), Term(entropy_bonus, 0.0, "entropy")) and found.aggregation == "token_mean"
    assert room.as_algorithm(GRPO) is GRPO
    with pytest.raises(SignatureError, match="neither"):
        room.as_algorithm(3)


@pytest.mark.parametrize(
    ("name", "words"),
    [("teacher_logprobs", "no teacher; type --teacher"), ("values", "no critic; type --critic head")],
)
def test_what_a_run_cannot_give_is_refused(name, words):
    scope = {}
    exec(f"def mine(logprobs, {name}): return logprobs", scope)
    chosen = room.as_algorithm(scope["mine"])
    with pytest.raises(SignatureError, match=f"mine names `{name}`, but this run has {words}"):
        checks.check_needs(chosen, ALWAYS)
    checks.check_needs(chosen, {"logprobs", name})
    checks.check_needs(GRPO, ALWAYS)


def test_parts_that_do_not_go_together_are_refused():
    checks.check_composition(GRPO, 8)
    checks.check_composition(DPO, 2)
    with pytest.raises(ConfigError, match="needs 2 or more of them"):
        checks.check_composition(DPO, 1)
    with pytest.raises(ConfigError, match="--aggregation token_mean: pairs need pair_mean"):
        checks.check_composition(DPO._replace(aggregation="token_mean"))
    with pytest.raises(ConfigError, match="there are no pairs; type --pairs best_worst"):
        checks.check_composition(GRPO._replace(aggregation="pair_mean"))
    with pytest.raises(ConfigError, match="ppo_clip does not name `pair_index`"):
        checks.check_composition(GRPO._replace(pairs=best_worst, aggregation="pair_mean"))
    with pytest.raises(ConfigError, match="leave --kl out"):
        checks.check_composition(DPO._replace(kl=KL(rk3_loss)))
    with pytest.raises(ConfigError, match="choose one of them"):
        checks.check_composition(DPO._replace(select=RFT.select))
    with pytest.raises(ConfigError, match="dpo compares pairs; type --pairs"):
        checks.check_composition(DPO._replace(pairs=None, aggregation="token_mean"))


def test_a_bare_loss_over_pairs_gets_the_usual_pairs():
    def mine(logprobs, advantages, pair_index):
        return torch.zeros(int(pair_index.max()) + 1) * logprobs.sum()

    found = room.as_algorithm(mine)
    assert found.pairs is best_worst and found.aggregation == "pair_mean"
    checks.check_composition(found, 4)


def evaluate(function, mask=None, **available):
    available = {"logprobs": torch.zeros(3, requires_grad=True), "advantages": torch.ones(3)} | available
    return evaluate_algorithm(room.as_algorithm(function), available, torch.ones(3) if mask is None else mask)


def scalar(logprobs):
    return logprobs.mean()


def matrix(logprobs):
    return logprobs[:, None]


def number(logprobs):
    return 1.0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (scalar, "scalar returned a scalar"),
        (matrix, r"matrix returned shape \[3, 1\]"),
        (number, "number returned float"),
    ],
)
def test_wrong_shapes_are_named(function, words):
    with pytest.raises(TrainingError, match=words):
        evaluate(function)


def test_nan_counts_only_where_live():
    def broken(logprobs):
        return logprobs + torch.tensor([float("nan"), 0.0, float("inf")])

    found = evaluate(broken, mask=torch.tensor([0.0, 1.0, 0.0]))
    assert found.values.tolist() == [0.0, 0.0, 0.0] and not found.nan["broken"]
    assert evaluate(broken).nan["broken"]
    bound = functools.partial(broken)
    assert "broken" in evaluate(bound).nan


def test_terms_add_up_and_report():
    def reporting(logprobs, *, scale: float = 2.0):
        return logprobs + scale, {"doubled": torch.tensor([1.0, 2.0, 3.0]), "one": 1.0}

    composed = Algorithm(group_mean, "token_mean", (Term(reporting), Term(lambda logprobs: logprobs + 1, -0.5)))
    found = evaluate_algorithm(composed, {"logprobs": torch.zeros(3)}, torch.tensor([1.0, 0.0, 1.0]))
    assert found.values.tolist() == [1.5, 0.0, 1.5]
    doubled, one = found.metrics["doubled"], found.metrics["one"]
    assert (doubled.value.item(), doubled.number.item()) == (4.0, 2.0)
    assert one.value.item() / one.number.item() == 1.0


def test_metrics_have_kinds():
    def reporting(logprobs):
        values = torch.tensor([1.0, 9.0, 3.0])
        return logprobs, {"most": (values, "max"), "least": (values, "min"), "all": (values, "sum")}

    found = evaluate(reporting, mask=torch.tensor([1.0, 0.0, 1.0])).metrics
    assert {name: metric.value.item() for name, metric in found.items()} == {"most": 3.0, "least": 1.0, "all": 4.0}

    def wrong(logprobs):
        return logprobs, {"most": (logprobs, "median")}

    with pytest.raises(TrainingError, match=r"wrong reports 'most' of kind 'median' \(choices: mean, sum, max, min"):
        evaluate(wrong)


def test_one_value_a_pair_is_expected_where_the_aggregation_says_so():
    pairs = torch.tensor([4, 4, 7])

    def per_pair(logprobs, pair_index):
        return torch.stack([logprobs[pair_index == pair].sum() for pair in pair_index.unique()])

    algorithm = room.as_algorithm(per_pair)
    available = {"logprobs": torch.ones(3), "pair_index": pairs}
    found = evaluate_algorithm(algorithm, available, torch.ones(3), unit="pair")
    assert found.values.tolist() == [2.0, 1.0]
    with pytest.raises(TrainingError, match=r"per_pair returned shape \[2\]; expected one value per token"):
        evaluate_algorithm(algorithm, available, torch.ones(3))
    with pytest.raises(TrainingError, match=r"returned shape \[3\]; expected one value per pair, shape \[2\]"):
        evaluate_algorithm(GRPO._replace(terms=(Term(entropy_bonus),)), available | {"entropy": torch.ones(3)},
                           torch.ones(3), unit="pair")  # fmt: skip


def test_kl_in_the_loss_is_cut_steered_and_weights_touch_only_the_policy_term():
    def flat_kl(logprobs, ref_logprobs):
        return logprobs - ref_logprobs

    def policy(logprobs, advantages):
        return logprobs * 0 + advantages

    algorithm = Algorithm(group_norm, "token_mean", (Term(policy),), kl=KL(flat_kl, 0.5, threshold=3.0))
    available = {"logprobs": torch.tensor([1.0, 9.0]), "ref_logprobs": torch.zeros(2), "advantages": torch.ones(2)}
    mask, weights = torch.ones(2), torch.tensor([2.0, 0.0])
    assert evaluate_algorithm(algorithm, available, mask).values.tolist() == [1.5, 2.5]
    assert evaluate_algorithm(algorithm, available, mask, kl_coefficient=1.0).values.tolist() == [2.0, 4.0]
    assert evaluate_algorithm(algorithm, available, mask, weights=weights).values.tolist() == [2.5, 1.5]


def test_a_correction_is_told_of_by_name():
    def broken(old_logprobs, rollout_logprobs):
        return (old_logprobs - rollout_logprobs).log()

    available = {"old_logprobs": torch.zeros(2), "rollout_logprobs": torch.ones(2)}
    assert importance_weights(GRPO, available, torch.ones(2)) is None
    with pytest.raises(TrainingError, match="off-policy correction broken returned"):
        importance_weights(GRPO._replace(correction=broken), available, torch.ones(2))


def test_an_advantage_that_names_what_the_run_cannot_give_is_refused():
    def by_turn(rewards, turn_rewards):
        return [turns[-1] for turns in turn_rewards]

    def by_length(rewards, lengths, *, power: float = 1.0):
        return rewards / lengths**power

    checks.check_advantage(functools.partial(by_length, power=2.0))
    checks.check_advantage(by_turn)
    with pytest.raises(SignatureError, match="gae names `values`, but this run has no critic; type --critic head"):
        checks.check_advantage(gae, ALWAYS)
    checks.check_advantage(gae, checks.available_names(critic=True))


def test_an_aggregation_of_ones_own():
    from rollouts.training.algorithms.aggregation import Masks, TokenWeights

    def longest_half(masks):
        return TokenWeights([[value * 2 for value in mask] for mask in masks], 3.0)

    found = aggregate(longest_half, Masks([[0.0, 1.0]], [0], [0]))
    assert found.weights == [[0.0, 2.0]] and found.denominator == 3.0 and found.unit == "token"
    with pytest.raises(TrainingError, match="aggregation <lambda> returned list; expected TokenWeights"):
        aggregate(lambda masks: list(masks), Masks([[0.0, 1.0]], [0], [0]))


def test_an_error_that_may_depend_on_the_numbers_is_left_to_the_first_batch():
    """A variable that no invented number sets, and lengths whose deviation is 0 only if they are equal."""

    def late(logprobs, advantages):
        for value in logprobs.tolist():
            if value < -100:
                last = value
        return logprobs * last

    def by_length(rewards, lengths):
        return (rewards - rewards.mean()) / lengths.double().std()

    checks.probe_settings(Algorithm(by_length, "token_mean", (Term(late),)))
    with pytest.raises(ConfigError, match="raised NameError: name 'last' is not defined"):
        checks.probe_settings(Algorithm(by_length, "token_mean", (Term(lambda logprobs: last),)))  # noqa: F821
