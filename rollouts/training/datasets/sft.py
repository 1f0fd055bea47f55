"""Supervised samples as padded tensors, for your own training loop.

Not here: reading files and hubs. `run_sft_training` makes its own batches, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollouts.errors import TrainingError
from rollouts.training.simple.conversations import compute_loss_mask as compute_loss_mask
from rollouts.training.simple.conversations import tokenize_conversation as tokenize_conversation
from rollouts.types import Sample

if TYPE_CHECKING:
    from torch import Tensor


def take_batch(samples: Sequence[Sample], batch_size: int, step: int) -> list[Sample]:
    """The samples of a step, each as a rollout of its own. After the last sample, the first one follows.

    >>> [sample.prompt for sample in take_batch([Sample("a"), Sample("b"), Sample("c")], 2, 1)]
    ['c', 'a']
    """
    start = step * batch_size
    return [samples[(start + offset) % len(samples)] for offset in range(batch_size)]


def collate_batch(samples: Sequence[Sample], batch_size: int, step: int) -> dict[str, Tensor]:
    """Make the batch of a step with `prepare_sft_batch`, from the next `batch_size` samples.

    Raises TrainingError if there are no samples.
    """
    if not samples or batch_size < 1:
        what = f"a batch of {batch_size} cannot be taken from {len(samples)} samples"
        raise TrainingError(f"{what}; give 1 or more of each")
    return prepare_sft_batch(take_batch(samples, batch_size, step))


def prepare_sft_batch(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """`input_ids` and `labels` [B, L] int64 and `loss_mask` [B, L] float32, padded with 0 on the right.

    Labels are the token ids, not shifted, as transformers expects them. The mask is 0 on padding, so a loss needs no
    other mask. Raises TrainingError for a sample whose mask and tokens differ in length.

    >>> prepare_sft_batch([Sample(tokens=[5, 6, 7], loss_mask=[0, 1, 1]), Sample(tokens=[5], loss_mask=[0])])["labels"]
    tensor([[5, 6, 7],
            [5, 0, 0]])
    """
    import torch

    for number, sample in enumerate(samples):
        if len(sample.tokens) != len(sample.loss_mask):
            lengths = f"{len(sample.tokens)} tokens and {len(sample.loss_mask)} mask entries"
            raise TrainingError(f"sample {number} has {lengths}; it needs one for each")
    width = max((len(sample.tokens) for sample in samples), default=0)
    input_ids = torch.zeros(len(samples), width, dtype=torch.int64)
    loss_mask = torch.zeros(len(samples), width)
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample.tokens)] = torch.tensor(sample.tokens, dtype=torch.int64)
        loss_mask[row, : len(sample.tokens)] = torch.as_tensor(sample.loss_mask, dtype=torch.float32)
    return {"input_ids": input_ids, "labels": input_ids.clone(), "loss_mask": loss_mask}
