"""Batches from a `generate_fn`, without a manager: a generator, and a deprecated class.

    batches = generate_rollout_batches(buffer, RolloutConfig(batch_size=4, generate_fn=my_fn))

`user_functions` describes the functions. Not here: concurrent groups (`manager`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import trio

from rollouts.author_code import authors_code, unwrapped
from rollouts.error_log import report
from rollouts.errors import ConfigError, RolloutsError
from rollouts.training.algorithms.algorithm import function_label
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.groups import drop_reason
from rollouts.types import Sample
from rollouts_notes.rows import RolloutBatch, RolloutConfig, convert_to_batch
from rollouts_notes.user_functions import bare_prompt, check_samples, score_of


def generate_rollout_batches(
    data_buffer: DataBuffer, config: RolloutConfig, **rollout_kwargs: Any
) -> Iterator[RolloutBatch]:
    """Yield batches without end. `rollout_kwargs` are passed to `config.generate_fn`.

    Each batch has the next `batch_size` prompts, without the groups that the filter drops. Do not use it inside of a
    trio program. Raises ConfigError if the configuration needs AsyncRolloutManager.
    """
    if config.generate_fn is None:
        raise ConfigError("generate_rollout_batches needs a generate_fn: RolloutConfig(..., generate_fn=my_function)")
    if config.over_sampling_factor > 1 or config.refill:
        raise ConfigError("over_sampling_factor and refill need AsyncRolloutManager instead of a generator")
    return _batches(data_buffer, config, functools.partial(config.generate_fn, **rollout_kwargs))


def _batches(data_buffer: DataBuffer, config: RolloutConfig, generate: Callable[..., Any]) -> Iterator[RolloutBatch]:
    size, step = config.n_samples_per_prompt, 0
    while True:
        prompts = [bare_prompt(task) for task in data_buffer.get_prompts(config.batch_size, step=step)]
        prompts = [prompt for prompt in prompts for _ in range(size)]
        samples = [
            sample if sample.group_index is not None else dataclasses.replace(sample, group_index=index // size)
            for index, sample in enumerate(check_samples(_call(generate, prompts), len(prompts)))
        ]
        yield convert_to_batch(apply_sample_transforms(samples, config), data_buffer.epoch_id, step)
        step += 1


def apply_sample_transforms(samples: Sequence[Sample], config: RolloutConfig) -> list[Sample]:
    """Set the samples' rewards with `reward_fn`, and remove the groups that `filter_fn` drops.

    Samples with the same `group_index` are a group. A sample without a `group_index` is a group of its own.
    """
    rewarded = list(samples)
    if config.reward_fn is not None:
        rewarded = [dataclasses.replace(each, reward=_reward(config.reward_fn, each)) for each in rewarded]
    if config.filter_fn is None:
        return rewarded
    groups: dict[object, list[Sample]] = {}
    for position, sample in enumerate(rewarded):
        key = ("single", position) if sample.group_index is None else sample.group_index
        groups.setdefault(key, []).append(sample)
    name = function_label(config.filter_fn)
    kept = [group for group in groups.values() if drop_reason(name, _call(config.filter_fn, group)) is None]
    return [sample for group in kept for sample in group]


def _reward(reward_fn: Callable[..., Any], sample: Sample) -> float | None:
    try:
        returned = _call(reward_fn, sample)
    except RolloutsError:
        raise
    except Exception as error:  # a reward that raises could not judge
        report(error, "reward_fn")
        return None
    return score_of(returned).value


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function; a coroutine function runs in a trio loop of its own."""
    with authors_code():
        if inspect.iscoroutinefunction(unwrapped(function)):
            return trio.run(functools.partial(function, *args))
        return function(*args)


class RolloutManager:
    """Deprecated: `generate_rollout_batches` as a class with a saved state."""

    def __init__(self, data_buffer: DataBuffer, config: RolloutConfig, **rollout_kwargs: Any) -> None:
        warnings.warn(
            "RolloutManager is deprecated and will be removed in a future version. "
            "Use generate_rollout_batches() from rollouts.training.rollout_generation instead. "
            "For async rollout generation, use AsyncRolloutManager.",
            DeprecationWarning,
            stacklevel=2,
        )
        self.data_buffer = data_buffer
        self.config = config
        self.step_id = 0
        self._batches = generate_rollout_batches(data_buffer, config, **rollout_kwargs)

    def __iter__(self) -> RolloutManager:
        return self

    def __next__(self) -> RolloutBatch:
        batch = next(self._batches)
        batch.metadata["step_id"] = self.step_id
        self.step_id += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The state of the data buffer, and the number of batches so far."""
        return {"data_buffer": self.data_buffer.state_dict(), "step_id": self.step_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.data_buffer.load_state_dict(state["data_buffer"])
        self.step_id = state["step_id"]
