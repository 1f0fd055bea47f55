"""Conversations to tokens and masks, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.simple.conversations import compute_loss_mask as compute_loss_mask
from rollouts.training.simple.conversations import tokenize_conversation as tokenize_conversation
