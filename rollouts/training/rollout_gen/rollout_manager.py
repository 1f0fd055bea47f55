"""A deprecated manager, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.rollout_gen.rollout_generation import RolloutManager as RolloutManager
