"""The core's own reward functions. There is one, for runs that need no judgment."""

from __future__ import annotations

from rollouts.types import Trajectory


def constant(trajectory: Trajectory, *, value: float = 0.0) -> float:
    """The same for every rollout: for losses that need no judgment, such as on-policy distillation.

    Args:
        value: the reward
    """
    return value
