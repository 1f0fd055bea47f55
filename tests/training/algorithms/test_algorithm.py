"""Compositions: what they need, their settings, and how a wrong loss is told so by its name."""

from __future__ import annotations

import functools

import pytest
import torch

from rollouts.errors import ConfigError, SignatureError, TrainingError
from rollouts.training.algorithms import algorithm as room
from rollouts.training.algorithms.advantages import group_mean
from rollouts.training.algorithms.algorithm import Algorithm, Term
from rollouts.training.algorithms.losses import entropy_bonus, ppo_clip
from rollouts.training.algorithms.recipes import GRPO, SFT


def test_needs_and_settings_of_compositions():
    both = Algorithm(group_mean, "token_mean", (Term(ppo_clip), Term(entropy_bonus, 0.01)))
    assert room.needs(both) == {"logprobs", "old_logprobs", "advantages", "entropy"}
    assert [setting.name for setting in room.algorithm_settings(both)] == ["clip_low", "clip_high"]
    bound = room.bind_algorithm(both, {"clip_high": 0.28}, aggregation="rollout_mean")
    assert room.setting_of(bound, "clip_high") == 0.28 and room.setting_of(bound, "clip_low") == 0.2
    assert room.setting_of(SFT, "clip_low") is None
    assert room.needs(bound) == room.needs(both) and bound.aggregation == "rollout_mean"
    assert room.setting_of(both, "clip_high") == 0.2, "binding changes nothing in place"


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'clip_high'"):
        room.bind_algorithm(GRPO, {"clip_hig": 0.3})
    with pytest.raises(ConfigError, match="choices: dr_grpo"):
        room.bind_algorithm(GRPO, {}, aggregation="mean")
    with pytest.raises(ConfigError, match="no pairs of rollouts"):
        room.bind_algorithm(GRPO, {}, aggregation="pair_mean")


def test_a_bare_loss_becomes_an_algorithm():
    def mine(logprobs, advantages):
        return -logprobs * advantages

    found = room.as_algorithm(mine)
    assert found.terms == (Term(mine),) and found.aggregation == "token_mean"
    assert room.as_algorithm(GRPO) is GRPO
    with pytest.raises(SignatureError, match="neither"):
        room.as_algorithm(3)


@pytest.mark.parametrize(
    ("name", "words"),
    [("ref_logprobs", "no reference model"), ("teacher_logprobs", "no teacher"), ("values", "no critic")],
)
def test_what_a_run_cannot_give_is_refused(name, words):
    scope = {}
    exec(f"def mine(logprobs, {name}): return logprobs", scope)
    chosen = room.as_algorithm(scope["mine"])
    with pytest.raises(SignatureError, match=f"mine names `{name}`, but this run has {words}"):
        room.check_needs(chosen)
    room.check_needs(chosen, {"logprobs", name})
    room.check_needs(GRPO)


def evaluate(function, mask=None, **available):
    available = {"logprobs": torch.zeros(3, requires_grad=True), "advantages": torch.ones(3)} | available
    return room.evaluate(room.as_algorithm(function), available, torch.ones(3) if mask is None else mask)


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
    found = room.evaluate(composed, {"logprobs": torch.zeros(3)}, torch.tensor([1.0, 0.0, 1.0]))
    assert found.values.tolist() == [1.5, 0.0, 1.5]
    assert found.metrics["doubled"].item() == 4.0 and found.metrics["one"].item() == 2.0


def test_an_advantage_that_names_what_the_run_cannot_give_is_refused():
    def whole_batch(batch, rewards):
        return rewards

    def by_length(rewards, lengths, *, power: float = 1.0):
        return rewards / lengths**power

    room.check_advantage(functools.partial(by_length, power=2.0))
    with pytest.raises(SignatureError, match=r"names `batch`.*`lengths` and `rewards` only"):
        room.check_advantage(whole_batch)
