"""Calls the functions of a RolloutConfig, checks their results, and makes groups of them.

`generate_fn(prompts)` returns one Sample for each prompt. `reward_fn(sample)` returns the reward, or None if it cannot
judge. `filter_fn(samples)` gets the samples of one prompt, and returns True to keep them, or False or a reason to drop
them. Each is a plain function or a coroutine function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import trio

from rollouts.env import calls
from rollouts.env.mixing import mix, read_verdict
from rollouts.error_log import report
from rollouts.errors import RolloutsError, RunError, words_of
from rollouts.training.algorithms.algorithm import function_label
from rollouts.training.rollout_gen.groups import Group, drop_reason, group_samples
from rollouts.training.samples import episode_samples
from rollouts.types import Episode, Message, Sample, Score, Segment, Status, Task, Trajectory
from rollouts_notes.rows import RolloutConfig, with_grade, with_lists


async def generate_group(config: RolloutConfig, task: Task, version: int | None) -> list[Sample]:
    """Make one group with `generate_fn`. Samples with logprobs and without versions get `version` (None: unknown).

    If the function raises or takes too long, the returned samples have a failed status. Raises RunError if it returns
    anything but samples.
    """
    assert config.generate_fn is not None, "checked when the manager was made"
    count, seconds = config.n_samples_per_prompt, config.generate_seconds
    prompts = [bare_prompt(task) for _ in range(count)]
    try:
        returned = await calls.call(functools.partial(config.generate_fn, prompts), timeout_seconds=seconds)
    except trio.TooSlowError:
        status, why = Status.TIMEOUT, f"generate_fn took longer than {seconds:g} seconds"
    except RolloutsError:
        raise
    except Exception as error:  # generate_fn may raise anything
        status, why = Status.ENVIRONMENT_ERROR, f"generate_fn: {report(error, 'generate_fn')}"
    else:
        return [_stamped(sample, version) for sample in check_samples(returned, count)]
    return [Sample(task.prompt, reward=None, status=status, metadata={"error": why}) for _ in range(count)]


def bare_prompt(task: Task) -> Any:
    """The input of `generate_fn`: the plain prompt if the task has nothing else, as it was put into the buffer."""
    return task.prompt if task == Task(task.prompt) else task


def check_samples(returned: Any, count: int) -> list[Sample]:
    """Check what `generate_fn` returned. Raises RunError."""
    samples = list(returned) if isinstance(returned, Sequence) else None
    if samples is None or len(samples) != count or not all(isinstance(sample, Sample) for sample in samples):
        shown = type(returned).__name__
        if samples is not None:
            shown = f"{len(samples)} of {[type(sample).__name__ for sample in samples[:3]]}"
        raise RunError(f"generate_fn returned {shown} for {count} prompts; expected a list of one Sample for each")
    samples = [with_lists(sample) for sample in samples]
    for sample in samples:
        try:
            sample.check()
        except AssertionError as error:
            raise RunError(f"generate_fn returned a Sample that is not whole: {error}") from error
    return samples


def _stamped(sample: Sample, version: int | None) -> Sample:
    if version is None or sample.rollout_log_probs is None or sample.policy_versions is not None:
        return sample
    return dataclasses.replace(sample, policy_versions=[version if weight > 0 else -1 for weight in sample.loss_mask])


def sample_group(number: int, task: Task, samples: Sequence[Sample]) -> Group:
    """Make a group of the samples of one task."""
    episodes = [sample_episode(sample, task, (number, index)) for index, sample in enumerate(samples)]
    return Group(number, task, tuple(episodes), samples=tuple(samples))


def sample_episode(sample: Sample, task: Task, order: tuple[int, int]) -> Episode:
    """Make an episode of a sample. A sample without a final status is completed."""
    status = Status.COMPLETED if sample.status is Status.PENDING else sample.status
    segments = []
    if sample.rollout_log_probs is not None:
        versions = sample.policy_versions if sample.policy_versions is not None else [-1] * len(sample.tokens)
        mask, logprobs = list(sample.loss_mask), list(sample.rollout_log_probs)
        segments = [Segment(list(sample.tokens), mask, logprobs, list(versions))]
    messages = [*task.messages, Message("assistant", sample.response)]
    why = sample.metadata.get("error") if status.is_infrastructure else None
    trajectory = Trajectory(task, messages, segments, status, error=why)
    trajectory.metrics["turns"] = 1.0
    score = Score(None if status.is_infrastructure else sample.reward, dict(sample.parts))
    return Episode(order, task, [trajectory], score, dict(trajectory.metrics))


def score_of(returned: Any) -> Score:
    """Turn the result of `reward_fn` into a score. Raises RewardError if it is not a reward."""
    return mix([read_verdict("reward_fn", 1.0, returned)])


def graded(reward_fn: Callable[[Sample], Any]) -> Callable[[Sample], Any]:
    """The function, for samples whose metadata has `correct` (`with_grade`)."""
    return lambda sample: reward_fn(with_grade(sample))


async def reward_group(group: Group, reward_fn: Callable[..., Any]) -> Group:
    """Return the group with the scores of `reward_fn`. After an infrastructure failure, the score stays None."""
    episodes = []
    for index, episode in enumerate(group.episodes):
        samples = [group.samples[index]] if group.samples else episode_samples(episode, 0, 0)
        if samples and not episode.status.is_infrastructure:
            try:
                score = await calls.call(reward_fn, samples[-1], convert=score_of)
            except RolloutsError:
                raise
            except Exception as error:  # reward_fn may raise anything
                score = Score(None, {"reward_fn": None}, f"reward_fn could not judge: {report(error, 'reward_fn')}")
            episode = episode._replace(score=score)
        episodes.append(episode)
    return group._replace(episodes=tuple(episodes))


async def filter_group_by(filter_fn: Callable[..., Any], group: Group) -> Group:
    """Return the group, with `dropped` set if `filter_fn` drops it. Raises RunError if the function raises."""
    name = function_label(filter_fn)
    try:
        returned = await calls.call(filter_fn, group_samples([group]))
    except RolloutsError:
        raise
    except Exception as error:  # filter_fn may raise anything
        raise RunError(f"the filter {name} raised {words_of(error)}") from error
    return group._replace(dropped=drop_reason(name, returned))
