"""Training data: `buffer` (DataBuffer: the next task), `mixing` (MixedBuffer: tasks of several sources). The
functions for your own loop are in the package `rollouts_notes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts_notes.supervised import collate_batch as collate_batch
    from rollouts_notes.supervised import compute_loss_mask as compute_loss_mask
    from rollouts_notes.supervised import load_dataset as load_dataset
    from rollouts_notes.supervised import load_sft_dataset as load_sft_dataset
    from rollouts_notes.supervised import load_sft_samples as load_sft_samples
    from rollouts_notes.supervised import prepare_sft_batch as prepare_sft_batch
    from rollouts_notes.supervised import tokenize_conversation as tokenize_conversation

    from rollouts.training.datasets.buffer import DataBuffer as DataBuffer

__getattr__, __dir__ = lazy_face(__name__)
