"""Conversations to tokens and masks, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.datasets.sft import compute_loss_mask as compute_loss_mask
from rollouts.training.datasets.sft import tokenize_conversation as tokenize_conversation
