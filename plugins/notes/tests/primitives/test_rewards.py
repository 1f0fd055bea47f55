"""Primitives of rewards: values, vectors, and what a function may return."""

from __future__ import annotations

import math

import pytest
import torch

from rollouts.errors import ConfigError, RewardError, TrainingError, UnknownComponentError
from rollouts.primitives import (
    Generation,
    Rollout,
    aggregate_vector_rewards,
    apply_reward_shaping,
    compute_batch_rewards,
    compute_reward_model_score,
    compute_scalar_reward,
    compute_vector_reward,
    load_reward_model,
    normalize_rewards,
)

ROLLOUT = Rollout("2 + 3", Generation("5"), metadata={"answer": "5"})


def right(rollout):
    return rollout.generation.text == rollout.metadata["answer"]


def short(rollout):
    return -len(rollout.generation.text) / 10


@pytest.mark.parametrize("returned", [1, True, 1.0, torch.tensor(1.0), torch.ones(1)[0]])
def test_numbers(returned):
    found = compute_scalar_reward(ROLLOUT, lambda rollout: returned)
    assert found == 1.0 and isinstance(found, float)


@pytest.mark.parametrize("returned", ["1", math.nan, math.inf, {}, [1.0, 2.0], torch.ones(2)])
def test_what_is_no_reward(returned):
    def mine(rollout):
        return returned

    with pytest.raises(RewardError, match=r"the function mine returned .*; expected a finite number, or None"):
        compute_scalar_reward(ROLLOUT, mine)


def test_a_reward_that_cannot_judge_and_one_that_raises():
    assert compute_scalar_reward(ROLLOUT, lambda rollout: None) is None
    with pytest.raises(RewardError, match="the reward_fn right raised KeyError: 'answer'"):
        compute_scalar_reward(ROLLOUT._replace(metadata={}), right)


def test_vectors():
    assert compute_vector_reward(ROLLOUT, [right, short]) == [1.0, -0.1]
    assert compute_vector_reward(ROLLOUT, {"right": right, "short": short}) == [1.0, -0.1]
    assert compute_vector_reward(ROLLOUT, lambda rollout: (1, None)) == [1.0, None]
    assert compute_vector_reward(ROLLOUT, lambda rollout: torch.tensor([0.5, 1.0])) == [0.5, 1.0]
    with pytest.raises(RewardError, match="expected a list of numbers"):
        compute_vector_reward(ROLLOUT, right)
    with pytest.raises(ConfigError, match="there are no reward functions"):
        compute_vector_reward(ROLLOUT, [])


def test_aggregation():
    assert aggregate_vector_rewards([1.0, 0.25]) == 1.25
    seen = []
    assert aggregate_vector_rewards([1.0, 0.5], weights=[2, -1], aggregator=lambda r: seen.append(r) or max(r)) == 2.0
    assert seen == [[2.0, -0.5]]
    assert aggregate_vector_rewards([1.0, None]) is None
    with pytest.raises(ConfigError, match="1 weights for 2 rewards"):
        aggregate_vector_rewards([1.0, 2.0], weights=[1.0])
    with pytest.raises(RewardError, match="returned nan"):
        aggregate_vector_rewards([1.0], aggregator=lambda rewards: math.nan)


def test_a_batch_has_new_rollouts_with_their_rewards():
    batch = [ROLLOUT, ROLLOUT._replace(generation=Generation("6"))]
    assert [each.rewards for each in compute_batch_rewards(batch, right)] == [1.0, 0.0]
    mixed = compute_batch_rewards(batch, [right, short], weights=[1.0, 0.5])
    assert [each.rewards for each in mixed] == [0.95, -0.05]
    assert mixed[0].metadata == {"answer": "5", "reward_vector": [1.0, -0.1]}
    assert compute_batch_rewards(batch, lambda r: [1.0, 3.0], aggregator=min)[0].rewards == 1.0
    assert compute_batch_rewards(batch, lambda r: [1.0, None])[0].rewards is None
    assert ROLLOUT.rewards is None and ROLLOUT.metadata == {"answer": "5"}


def test_a_name_is_no_reward_function():
    with pytest.raises(ConfigError, match="the reward function is 'exact'; expected a function of a Rollout"):
        compute_batch_rewards([ROLLOUT], "exact")


def test_normalization():
    found = normalize_rewards([1.0, None, 0.0, 0.0])
    mean, deviation = 1 / 3, math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    assert found[1] is None
    assert [found[0], *found[2:]] == pytest.approx([(r - mean) / (deviation + 1e-4) for r in (1, 0, 0)])
    assert normalize_rewards([0.3, 0.3]) == [0.0, 0.0] and normalize_rewards([None]) == [None]
    seen = []
    assert normalize_rewards([2.0, None], normalizer=lambda r: seen.append(r) or [7]) == [7.0, None]
    assert seen == [[2.0]]
    with pytest.raises(TrainingError, match="2 finite numbers"):
        normalize_rewards([1.0, 2.0], normalizer=lambda rewards: [1.0])


def test_shaping():
    seen = []
    shaped = apply_reward_shaping(ROLLOUT._replace(rewards=1.0), shaping_fn=lambda *given: seen.append(given) or 0.5)
    assert shaped.rewards == 0.5 and seen == [(1.0, ROLLOUT._replace(rewards=1.0))]
    assert apply_reward_shaping(ROLLOUT, shaping_fn=lambda reward, rollout: 1 / 0) == ROLLOUT
    vector = apply_reward_shaping(ROLLOUT._replace(rewards=[1.0, None]), shaping_fn=lambda reward, rollout: reward * 2)
    assert vector.rewards == [2.0, None]

    def mine(reward, rollout):
        return "much"

    with pytest.raises(RewardError, match="the function mine returned 'much'"):
        apply_reward_shaping(ROLLOUT._replace(rewards=1.0), shaping_fn=mine)


def test_reward_models_name_their_package_and_work_with_functions(monkeypatch):
    def missing(kind, name):
        raise UnknownComponentError(f"no {name}")

    monkeypatch.setattr("rollouts_notes.primitives.utilities.find_component", missing)
    with pytest.raises(ConfigError, match=r"(?s)not installed.*pip install rollouts-reward-model.*model_loader=my_l"):
        load_reward_model("a/judge")
    with pytest.raises(ConfigError, match=r"(?s)pip install rollouts-reward-model.*scorer=my_scorer"):
        compute_reward_model_score("a model", ROLLOUT)
    seen = []
    assert compute_reward_model_score("a model", ROLLOUT, scorer=lambda *given: seen.append(given) or 0.5) == 0.5
    assert seen == [("a model", ROLLOUT)] and load_reward_model("x", model_loader=str.upper) == "X"
