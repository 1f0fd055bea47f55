"""Training data: `buffer` (DataBuffer: the next task), `mixing` (MixedBuffer: tasks of several sources), `sft`
(supervised rows as padded tensors).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.training.datasets.buffer import DataBuffer as DataBuffer
    from rollouts.training.datasets.dataset_loaders import load_dataset as load_dataset
    from rollouts.training.datasets.dataset_loaders import load_sft_dataset as load_sft_dataset
    from rollouts.training.datasets.dataset_loaders import load_sft_samples as load_sft_samples
    from rollouts.training.datasets.sft import collate_batch as collate_batch
    from rollouts.training.datasets.sft import compute_loss_mask as compute_loss_mask
    from rollouts.training.datasets.sft import prepare_sft_batch as prepare_sft_batch
    from rollouts.training.datasets.sft import tokenize_conversation as tokenize_conversation

__getattr__, __dir__ = lazy_face(__name__)
