"""Datasets as samples, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.datasets.dataset_loaders import load_dataset as load_dataset
from rollouts.training.datasets.dataset_loaders import load_sft_dataset as load_sft_dataset
from rollouts.training.datasets.dataset_loaders import load_sft_samples as load_sft_samples
