"""The supervised loop, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.datasets.sft import collate_batch as collate_batch
from rollouts.training.datasets.sft import prepare_sft_batch as prepare_sft_batch
from rollouts.training.simple.sft import run_sft_training as run_sft_training
