"""The reward that judges nobody."""

from __future__ import annotations

from rollouts.env.rewards import constant
from rollouts.types import Task, Trajectory


def test_the_same_for_every_rollout():
    trajectory = Trajectory(Task("x"), [])
    assert constant(trajectory) == 0.0 and constant(trajectory, value=2.5) == 2.5
