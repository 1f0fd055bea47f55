"""A reward that any environment can be given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollouts import Trajectory


def brevity(trajectory: Trajectory, *, target_tokens: int = 10) -> float:
    """Tokens beyond the target, in targets.

    Args:
        target_tokens: as many are free
    """
    return max(trajectory.sampled_count - target_tokens, 0) / target_tokens
