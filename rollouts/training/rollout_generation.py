"""Batches from a `generate_fn`, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.rollout_gen.rollout_generation import apply_sample_transforms as apply_sample_transforms
from rollouts.training.rollout_gen.rollout_generation import generate_rollout_batches as generate_rollout_batches
from rollouts.training.rollout_gen.steps import build_batch_metadata as build_batch_metadata
from rollouts.training.rollout_gen.steps import compute_response_lengths as compute_response_lengths
from rollouts.training.rollout_gen.steps import convert_to_batch as convert_to_batch
from rollouts.training.rollout_gen.steps import extract_sample_fields as extract_sample_fields
