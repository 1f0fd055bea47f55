"""Supervised samples, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.datasets.dataset_loaders import load_sft_dataset as load_sft_dataset
from rollouts.training.datasets.sft import collate_batch as collate_batch
from rollouts.training.datasets.sft import compute_loss_mask as compute_loss_mask
from rollouts.training.datasets.sft import prepare_sft_batch as prepare_sft_batch
from rollouts.training.datasets.sft import tokenize_conversation as tokenize_conversation
