"""Losses over logits, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.simple.losses import compute_grpo_loss as compute_grpo_loss
from rollouts.training.simple.losses import grpo_loss as grpo_loss
from rollouts.training.simple.losses import ppo_loss as ppo_loss
