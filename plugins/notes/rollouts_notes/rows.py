"""RolloutConfig, and rows for training that you read and change yourself: RolloutBatch, its parts, and samples with
lists or tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from rollouts.errors import ConfigError
from rollouts.training.rollout_gen.steps import StepSettings
from rollouts.types import Sample

RLSample = Sample
"""The first notes' second name of `Sample`."""


@dataclass(frozen=True)
class RolloutConfig(StepSettings):
    """How many prompts and rollouts a step has, and the functions or the endpoint that make and judge them.

    Args:
        batch_size: groups of a step
        n_samples_per_prompt: rollouts of a group
        over_sampling_factor: ceil(batch_size * factor) groups are in flight; `keep` says which of them are trained
        keep: "first": the step ends when `batch_size` groups are complete; the others continue in the next step.
            "best": the step waits for all of them, and keeps those whose rewards differ most (their standard deviation;
            of equal ones the first)
        generate_fn: generate_fn(prompts) makes the samples of one group. See `user_functions`
        reward_fn: reward_fn(sample) returns the reward
        filter_fn: filter_fn(samples) says whether to keep a group
        concurrency: how many episodes play at once
        refill: replace groups that a filter drops, in at most `refills_max` rounds (dynamic sampling of DAPO)
        generate_seconds: deadline of a call of `generate_fn`
        staleness: how many steps are prefetched while an earlier one is trained
        endpoint: an Endpoint, the model that plays episodes of `environment`, in place of a `generate_fn`
        environment: an environment, as an object or a class
    """

    generate_fn: Callable[..., Any] | None = None
    reward_fn: Callable[..., Any] | None = None
    filter_fn: Callable[..., Any] | None = None
    _: KW_ONLY
    generate_seconds: float = 3600.0
    endpoint: Any = None
    environment: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.generate_seconds > 0, f"generate_seconds must be > 0, got {self.generate_seconds}"
        if (self.endpoint is None) != (self.environment is None):
            raise ConfigError("RolloutConfig: endpoint and environment belong together; give both, or a generate_fn")


@dataclass
class RolloutBatch:
    """Rows for training, and metadata.

    `tokens` and `loss_masks` are [row][L]; `rewards` [row] (NaN: not judged); `response_lengths` [row] are the numbers
    of trained tokens.
    """

    tokens: list[list[int]]
    loss_masks: list[list[float]]
    rewards: list[float]
    response_lengths: list[int]
    metadata: dict[str, Any] = field(default_factory=dict)
    rows: Sequence[Sample] = field(default_factory=list, repr=False, compare=False)

    @property
    def samples(self) -> list[Sample]:
        """The rows as samples with tensors: `input_ids`, `labels` and `loss_mask` [L]."""
        return with_tensors(self.rows)


def convert_to_batch(samples: Sequence[Sample], epoch_id: int, step_id: int) -> RolloutBatch:
    """Make a batch with one row for each sample."""
    tokens, loss_masks, rewards = extract_sample_fields(samples)
    metadata = build_batch_metadata(samples, epoch_id, step_id)
    return RolloutBatch(tokens, loss_masks, rewards, compute_response_lengths(loss_masks), metadata, samples)


def extract_sample_fields(samples: Sequence[Sample]) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """Tokens, loss masks and rewards (NaN: not judged) of each sample.

    >>> extract_sample_fields([Sample(tokens=[1, 2], loss_mask=[0.0, 1.0], reward=0.5)])
    ([[1, 2]], [[0.0, 1.0]], [0.5])
    """
    rewards = [math.nan if sample.reward is None else float(sample.reward) for sample in samples]
    return [list(sample.tokens) for sample in samples], [list(sample.loss_mask) for sample in samples], rewards


def compute_response_lengths(loss_masks: Sequence[Sequence[float]]) -> list[int]:
    """The number of trained tokens of each row.

    >>> compute_response_lengths([[0.0, 1.0, 1.0], [0.0]])
    [2, 0]
    """
    return [sum(weight > 0 for weight in mask) for mask in loss_masks]


def build_batch_metadata(samples: Sequence[Sample], epoch_id: int, step_id: int) -> dict[str, Any]:
    """`epoch_id`, `step_id`, `num_samples`; and for each row `group_indices`, `statuses`, and every key of the samples'
    metadata (None for samples without it).

    >>> build_batch_metadata([Sample(group_index=3, metadata={"correct": True})], 0, 7)["correct"]
    [True]
    """
    keys = dict.fromkeys(key for sample in samples for key in sample.metadata)
    own = {key: [sample.metadata.get(key) for sample in samples] for key in keys}
    return own | {
        "epoch_id": epoch_id,
        "step_id": step_id,
        "num_samples": len(samples),
        "group_indices": [sample.group_index for sample in samples],
        "statuses": [sample.status.value for sample in samples],
    }


def with_lists(sample: Sample) -> Sample:
    """The sample with lists as `tokens` and `loss_mask`, as the loops need it."""
    tokens, mask = sample.tokens, sample.loss_mask
    if isinstance(tokens, list) and isinstance(mask, list):
        return sample
    return dataclasses.replace(sample, tokens=list(map(int, tokens)), loss_mask=list(map(float, mask)))


def with_tensors(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with a tensor [L] as `loss_mask`, and with a grade."""
    import torch

    masks: list[Any] = [torch.as_tensor(each.loss_mask, dtype=torch.float32) for each in samples]
    return [dataclasses.replace(with_grade(each), loss_mask=mask) for each, mask in zip(samples, masks, strict=True)]


def with_grade(sample: Sample) -> Sample:
    """The sample whose metadata has `correct`. If it has none: whether the reward, such as an environment's, is 1 or
    more.
    """
    return dataclasses.replace(sample, metadata={"correct": (sample.reward or 0.0) >= 1.0, **sample.metadata})
