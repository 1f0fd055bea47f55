"""Samples from user functions: as a generator of batches, and as groups of the manager."""

from __future__ import annotations

import dataclasses
import math

import pytest
import trio
import trio.lowlevel

import rollouts.training as training
from rollouts.errors import ConfigError, RewardError, RunError
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    RolloutBatch,
    RolloutConfig,
    RolloutManager,
    apply_sample_transforms,
    build_batch_metadata,
    check_any_success,
    check_min_reward,
    check_quality_and_diversity,
    check_reasonable_length,
    check_response_diversity,
    check_reward_nonzero_std,
    compute_response_lengths,
    convert_to_batch,
    extract_sample_fields,
    generate_rollout_batches,
)
from rollouts.training.rollout_gen.steps import rollout_metrics
from rollouts.types import Sample, Status, Task

PROMPTS = ["one", "two", "three", "four"]


def made(prompts, tail=""):
    return [
        Sample(
            prompt=prompt,
            response=f"{prompt}{tail}",
            tokens=[1, 2, len(prompt)],
            loss_mask=[0.0, 1.0, 1.0],
            rollout_log_probs=[0.0, -0.5, -0.25],
            policy_versions=[-1, 4, 4],
            metadata={"long": len(prompt) > 3},
        )
        for prompt in prompts
    ]


async def made_async(prompts):
    await trio.lowlevel.checkpoint()
    return made(prompts)


def buffer():
    return DataBuffer(PROMPTS, shuffle=False)


def length_reward(sample):
    return float(len(sample.prompt))


@pytest.mark.parametrize("generate_fn", [made, made_async])
def test_the_generator(generate_fn):
    batches = generate_rollout_batches(buffer(), RolloutConfig(3, generate_fn=generate_fn, reward_fn=length_reward))
    first, second = next(batches), next(batches)
    assert type(first) is RolloutBatch
    assert first.tokens == [[1, 2, 3], [1, 2, 3], [1, 2, 5]] and first.loss_masks == [[0.0, 1.0, 1.0]] * 3
    assert first.rewards == [3.0, 3.0, 5.0] and first.response_lengths == [2, 2, 2]
    assert first.metadata == {
        "long": [False, False, True], "epoch_id": 0, "step_id": 0, "num_samples": 3, "group_indices": [0, 1, 2],
        "statuses": ["pending"] * 3,
    }  # fmt: skip
    assert (second.metadata["step_id"], second.metadata["epoch_id"]) == (1, 1)


def test_the_generator_gives_its_keywords_and_groups():
    seen = []

    def generate(prompts, *, tail):
        seen.append(prompts)
        return made(prompts, tail)

    def first_two(samples):
        assert len(samples) == 2
        return samples[0].prompt != "one"

    config = RolloutConfig(2, 2, generate_fn=generate, filter_fn=first_two)
    batch = next(generate_rollout_batches(buffer(), config, tail="!"))
    assert seen == [["one", "one", "two", "two"]] and len(batch.tokens) == 2
    assert batch.metadata["group_indices"] == [1, 1]


def test_a_task_that_is_more_than_a_prompt_is_given_whole():
    seen = []

    def generate(prompts):
        seen.extend(prompts)
        return made(["x"] * len(prompts))

    next(
        generate_rollout_batches(
            DataBuffer(["a", Task("b", answer=1)], shuffle=False), RolloutConfig(2, generate_fn=generate)
        )
    )
    assert seen == ["a", Task("b", answer=1)]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RolloutConfig(2), "needs a generate_fn"),
        (RolloutConfig(2, over_sampling_factor=2.0, generate_fn=made), "need AsyncRolloutManager"),
        (RolloutConfig(2, refill=True, generate_fn=made), "need AsyncRolloutManager"),
    ],
)
def test_the_generator_says_at_once_what_it_cannot_do(config, words):
    with pytest.raises(ConfigError, match=words):
        generate_rollout_batches(buffer(), config)


@pytest.mark.parametrize("returned", [None, [], made(["a"]), ["text", "text"], 7, made(["a"] * 3)])
def test_what_generate_fn_returns_is_checked(returned):
    with pytest.raises(RunError, match="one Sample for each"):
        next(generate_rollout_batches(buffer(), RolloutConfig(2, generate_fn=lambda prompts: returned)))


def test_a_sample_that_is_not_whole_is_refused():
    def generate(prompts):
        return [Sample(tokens=[1, 2], loss_mask=[1.0])]

    with pytest.raises(RunError, match="not whole: 2 tokens but 1 mask"):
        next(generate_rollout_batches(buffer(), RolloutConfig(1, generate_fn=generate)))


def test_a_reward_that_raises_or_gives_none_is_no_zero():
    def reward(sample):
        if sample.prompt == "one":
            raise KeyError("lost")
        return None if sample.prompt == "two" else 1

    samples = apply_sample_transforms(made(PROMPTS), RolloutConfig(1, reward_fn=reward))
    assert [sample.reward for sample in samples] == [None, None, 1.0, 1.0]
    assert math.isnan(convert_to_batch(samples, 0, 0).rewards[0])
    with pytest.raises(RewardError, match="reward_fn"):
        apply_sample_transforms(made(PROMPTS), RolloutConfig(1, reward_fn=lambda sample: math.nan))


def test_transforms_change_nothing_that_they_are_given():
    samples = made(PROMPTS)
    apply_sample_transforms(samples, RolloutConfig(1, reward_fn=length_reward, filter_fn=lambda group: False))
    assert samples == made(PROMPTS)
    assert extract_sample_fields([]) == ([], [], []) and compute_response_lengths([]) == []
    assert build_batch_metadata([], 1, 2)["num_samples"] == 0


def test_the_deprecated_manager():
    with pytest.warns(DeprecationWarning, match="Use generate_rollout_batches"):
        old = RolloutManager(buffer(), RolloutConfig(3, generate_fn=made))
    first = next(iter(old))
    state = old.state_dict()
    expected = next(old)
    with pytest.warns(DeprecationWarning):
        new = RolloutManager(buffer(), RolloutConfig(3, generate_fn=made))
    new.load_state_dict(state)
    assert next(new) == expected and expected.metadata["step_id"] == 1 and first.metadata["step_id"] == 0


# --- the manager ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generate_fn", [made, made_async])
def test_the_manager_takes_the_same_functions(generate_fn):
    config = RolloutConfig(2, 2, generate_fn=generate_fn, reward_fn=length_reward)
    own = AsyncRolloutManager(buffer(), config)
    step = trio.run(own.generate_batch)
    assert isinstance(step, RolloutBatch) and step.rewards == [3.0] * 4 and step.response_lengths == [2] * 4
    assert step.metadata["long"] == [False] * 4 and step.metadata["group_indices"] == [0, 0, 1, 1]
    assert [group.rewards for group in step.groups] == [[3.0, 3.0]] * 2
    assert step.groups[0].episodes[0].trajectory.sampled_count == 2
    assert rollout_metrics(step.groups)["rollout/tokens"] == 2.0
    again = trio.run(own.generate_batch, lambda sample: 7.0)
    assert again.rewards == [7.0] * 4 and own.statistics == (4, 4, 0, 0, 0)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = step.nonsense


def test_logprobs_without_versions_are_of_the_weights_that_were_served():
    async def generate(prompts):
        own.policy_version = 8  # new weights, while it samples
        return [dataclasses.replace(sample, policy_versions=None) for sample in made(prompts)]

    own = AsyncRolloutManager(buffer(), RolloutConfig(1, 2, generate_fn=generate, reward_fn=length_reward))
    (group,) = trio.run(own.generate_batch).groups
    assert [sample.policy_versions for sample in group.samples] == [None, None], "no run has said which are served"
    assert group.lengths == [2, 2] and group.episodes[0].trajectory.segments[0].versions == [-1, -1, -1]
    own.policy_version = 7
    (group,) = trio.run(own.generate_batch).groups
    assert [sample.policy_versions for sample in group.samples] == [[-1, 7, 7]] * 2


@pytest.mark.parametrize("is_async", [True, False])
def test_the_managers_filter_names_itself(is_async):
    async def only_long(samples):
        return len(samples[0].prompt) > 3

    config = RolloutConfig(
        2, 2, generate_fn=made, reward_fn=length_reward, filter_fn=only_long if is_async else check_any_success
    )
    step = trio.run(AsyncRolloutManager(buffer(), config).generate_batch)
    assert [group.dropped for group in step.groups] == (["only_long"] * 2 if is_async else [None] * 2)


def test_a_generate_fn_that_fails_is_a_failed_group():
    def generate(prompts):
        if prompts[0] == "one":
            raise OSError("no disk")
        return made(prompts)

    config = RolloutConfig(2, 2, generate_fn=generate, reward_fn=length_reward)
    step = trio.run(AsyncRolloutManager(buffer(), config).generate_batch)
    assert [group.dropped for group in step.groups] == ["no_reward", None]
    assert {episode.status for episode in step.groups[0].episodes} == {Status.ENVIRONMENT_ERROR}
    assert "no disk" in step.groups[0].samples[0].metadata["error"]


def test_over_sampling_with_a_generate_fn():
    async def generate(prompts):
        await trio.sleep(30 if prompts[0] == "one" else 0.001)
        return made(prompts)

    async def main():
        config = RolloutConfig(2, 2, 1.5, generate_fn=generate, reward_fn=length_reward)
        own = AsyncRolloutManager(buffer(), config)
        async with own:
            step = await own.generate_batch()
            assert [group.number for group in step.groups] == [1, 2] and own.statistics.carried == 1

    trio.run(main)


def test_either_play_or_generate_fn():
    with pytest.raises(ConfigError, match="neither is given"):
        AsyncRolloutManager(buffer(), RolloutConfig(2))


# --- the seeds' filters -----------------------------------------------------------------------------------------------


def group(*rewards, responses=None):
    texts = responses or [str(n) for n in range(len(rewards))]
    return [
        Sample(response=text, tokens=[1, 2], loss_mask=[0.0, 1.0], reward=r)
        for r, text in zip(rewards, texts, strict=True)
    ]


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (check_reward_nonzero_std(group(0.0, 1.0)), True),
        (check_reward_nonzero_std(group(1.0, 1.0)), False),
        (check_reward_nonzero_std(group(1.0, None)), False),
        (check_any_success(group(0.0, 0.5)), True),
        (check_any_success(group(0.0, 0.5), threshold=0.5), False),
        (check_min_reward(group(0.0, 1.0), 0.5), True),
        (check_min_reward(group(0.0, 1.0), 0.6), False),
        (check_min_reward(group(None)), False),
        (check_response_diversity(group(0, 0, 0, responses=["a", "a", "a"])), False),
        (check_response_diversity(group(0, 0, responses=["a", "b"])), True),
        (check_response_diversity(group(0, 0, responses=["", ""])), True),  # half of them: tokens tell them apart
        (check_response_diversity([]), False),
        (check_reasonable_length(group(0.0)), True),
        (check_reasonable_length(group(0.0), min_length=2), False),
        (check_reasonable_length(group(0.0), max_length=0), False),
        (check_quality_and_diversity(group(0.0, 1.0)), True),
        (check_quality_and_diversity(group(0.0, 1.0), min_reward=0.9), False),
        (check_quality_and_diversity(group(0.0, 1.0, responses=["a", "a"]), min_unique_ratio=0.6), False),
    ],
)
def test_checks(verdict, expected):
    assert verdict is expected


def test_a_rollout_of_two_rows_counts_once():
    rows = [
        Sample(reward=1.0, rollout_index=0),
        Sample(reward=1.0, rollout_index=0),
        Sample(reward=0.0, rollout_index=1),
    ]
    assert check_min_reward(rows, 0.5) and not check_min_reward(rows, 0.6)


def test_the_names_are_on_the_face():
    names = [name for name in training.__all__ if name.startswith("check_")]
    assert len(names) == 6 and set(training.__all__) <= set(dir(training))
