"""Supervised batches for your own loop: padded tensors, repeated after the last sample."""

from __future__ import annotations

import pytest
import torch

from rollouts.errors import TrainingError
from rollouts.training import collate_batch, prepare_sft_batch
from rollouts.training.loops.sft import take_batch
from rollouts.types import Sample


def test_batches_go_around():
    samples = [Sample(str(number)) for number in range(3)]
    assert [[s.prompt for s in take_batch(samples, 2, step)] for step in range(3)] == [
        ["0", "1"],
        ["2", "0"],
        ["1", "2"],
    ]
    assert [s.prompt for s in take_batch(samples, 4, 0)] == ["0", "1", "2", "0"]


def test_padding_is_0_and_not_trained():
    batch = prepare_sft_batch([Sample(tokens=[5, 6, 7], loss_mask=[0, 0.5, 1]), Sample(tokens=[8], loss_mask=[1])])
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 0.5, 1], [1, 0, 0]] and batch["input_ids"].dtype == torch.int64


def test_a_step_takes_its_samples():
    samples = [Sample(tokens=[number], loss_mask=[1]) for number in range(3)]
    assert collate_batch(samples, 2, 1)["input_ids"].tolist() == [[2], [0]]


def test_mistakes_are_named():
    with pytest.raises(TrainingError, match="sample 1 has 2 tokens and 1 mask entries"):
        prepare_sft_batch([Sample(), Sample(tokens=[1, 2], loss_mask=[1])])
    with pytest.raises(TrainingError, match="a batch of 4 cannot be taken from 0 samples"):
        collate_batch([], 4, 0)
