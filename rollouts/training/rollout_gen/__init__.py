"""Many rollouts at once: `episodes` (run_episodes), `group_rewards` (rewards that see a whole group), `groups` (pure
functions on groups), `manager` (AsyncRolloutManager).
"""

from rollouts.training.rollout_gen.episodes import Job, Play, run_episodes
from rollouts.training.rollout_gen.group_rewards import GroupScorer, group_scorer
from rollouts.training.rollout_gen.groups import (
    Filter,
    Group,
    filter_group,
    group_samples,
    reward_metrics,
    rollout_metrics,
)
from rollouts.training.rollout_gen.manager import AsyncRolloutManager, RolloutConfig, RolloutStatistics, RolloutStep

__all__ = [
    "AsyncRolloutManager",
    "Filter",
    "Group",
    "GroupScorer",
    "Job",
    "Play",
    "RolloutConfig",
    "RolloutStatistics",
    "RolloutStep",
    "filter_group",
    "group_samples",
    "group_scorer",
    "reward_metrics",
    "rollout_metrics",
    "run_episodes",
]
