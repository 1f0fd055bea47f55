"""Concurrent groups of rollouts, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.rollout_gen.manager import AsyncRolloutManager as AsyncRolloutManager
