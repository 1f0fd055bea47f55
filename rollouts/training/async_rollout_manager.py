"""Concurrent groups of rollouts, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.simple.rollouts import AsyncRolloutManager as AsyncRolloutManager
