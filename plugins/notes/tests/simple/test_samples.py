"""Samples with tensors, and what is made of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from rollouts_notes.rows import with_lists

import rollouts
from rollouts.errors import TrainingError
from rollouts.training import RLSample, RolloutBatch, Sample, compute_reward, convert_to_batch, prepare_sft_batch

REWARDS = [(1.0, {}), (0.5, {}), (None, {}), (1.0, {"correct": False}), (0.0, {"correct": True})]
IDS = torch.tensor([5, 6, 7])


def test_a_sample_of_tensors_is_a_sample():
    sample = Sample(input_ids=IDS, labels=IDS, loss_mask=torch.tensor([0, 1, 1]))
    assert isinstance(sample, rollouts.Sample) and RLSample is Sample
    assert sample.tokens == [5, 6, 7] and sample.loss_mask.tolist() == [0.0, 1.0, 1.0]
    stacked = torch.stack([each for one in (sample, sample) for each in (one.input_ids, one.labels)])
    assert stacked.tolist() == [[5, 6, 7]] * 4 and torch.stack([sample.loss_mask]).dtype == torch.float32
    changed = dataclasses.replace(sample, reward=1.0)
    assert (type(changed), changed.reward, changed.tokens) == (Sample, 1.0, [5, 6, 7])
    assert with_lists(sample).loss_mask == [0.0, 1.0, 1.0]


def test_a_sample_of_lists_has_lists_and_shows_tensors():
    sample = Sample("2 + 2?", "4", [1, 2], [0.0, 1.0], 1.0, rollout_log_probs=[0.0, -0.5], advantages=[0.0, 2.0])
    assert (sample.loss_mask, sample.reward, sample.advantages) == ([0.0, 1.0], 1.0, [0.0, 2.0])
    assert sample.input_ids.tolist() == sample.labels.tolist() == [1, 2]
    assert with_lists(sample) is sample
    sample.check()


@pytest.mark.parametrize(
    ("labels", "mask", "expected"),
    [
        (None, None, [1, 1, 1]),
        ([-100, 6, 7], None, [0, 1, 1]),
        ([-100, 6, 7], [1.0, 0.5, 0], [0, 0.5, 0]),
        ([9, 6, 7], [0, 1, 1], [0, 1, 1]),
    ],
)
def test_labels_and_masks(labels, mask, expected):
    sample = Sample(input_ids=IDS, labels=labels and torch.tensor(labels), loss_mask=mask and torch.tensor(mask))
    assert sample.loss_mask.tolist() == expected


@pytest.mark.parametrize(
    ("labels", "mask", "words"),
    [
        ([6, 7, 8], None, "label 0 is 6 and input_ids 0 is 5; labels are the token ids, not shifted, or -100"),
        ([6, 7], None, r"input_ids \[3\], labels \[2\], loss_mask \[3\]"),
        (None, [1, 1], r"loss_mask \[2\]"),
    ],
)
def test_labels_that_do_not_fit(labels, mask, words):
    with pytest.raises(TrainingError, match=words):
        Sample(input_ids=IDS, labels=labels and torch.tensor(labels), loss_mask=mask and torch.tensor(mask))


def test_a_batch_has_its_samples_with_tensors():
    batch = convert_to_batch([rollouts.Sample("q", tokens=[1, 2], loss_mask=[0.0, 1.0], reward=0.5)], 0, 0)
    (sample,) = batch.samples
    assert (sample.prompt, sample.reward, sample.loss_mask.tolist()) == ("q", 0.5, [0.0, 1.0])
    assert torch.stack([sample.input_ids]).tolist() == [[1, 2]]
    graded = convert_to_batch([rollouts.Sample(reward=r, metadata=m) for r, m in REWARDS], 0, 0).samples
    assert [compute_reward(each) for each in graded] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert RolloutBatch([[1]], [[1.0]], [0.0], [1]).samples == []
    assert prepare_sft_batch(batch.samples)["loss_mask"].tolist() == [[0.0, 1.0]]
