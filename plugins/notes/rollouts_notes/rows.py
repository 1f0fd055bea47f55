"""Rows for training that you read and change yourself: RolloutBatch, its parts, and samples with lists or tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouts.types import Sample

RLSample = Sample
"""The first notes' second name of `Sample`."""


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
