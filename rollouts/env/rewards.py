"""The core's only reward function, `constant`, for runs that need no reward."""

from __future__ import annotations

from rollouts.types import Trajectory


def constant(trajectory: Trajectory, *, value: float = 0.0) -> float:
    """The same reward for every rollout: for losses that need no reward, such as on-policy distillation.

    Args:
        value: the reward
    """
    return value
