"""Many rollouts at once.

manager             AsyncRolloutManager: a step's groups, while the next one's may be under way; steps (what it is told
                    and what it gives), live (a group on its way, and what a checkpoint keeps of it)
pool episodes       episodes side by side, stopped and going on; all of them at once (run_episodes)
failures            which episodes are played again, and how many may fail
groups group_rewards    pure functions on groups; rewards that see a whole group
rollout_generation  samples that a function of one's own makes
"""

from rollouts.training.rollout_gen.episodes import run_episodes
from rollouts.training.rollout_gen.failures import FailurePolicy, Failures
from rollouts.training.rollout_gen.group_rewards import GroupScorer, group_scorer
from rollouts.training.rollout_gen.groups import (
    Filter,
    Group,
    filter_group,
    group_samples,
    reward_metrics,
    rollout_metrics,
)
from rollouts.training.rollout_gen.manager import AsyncRolloutManager
from rollouts.training.rollout_gen.pool import EpisodePool, Job, Play
from rollouts.training.rollout_gen.rollout_generation import (
    RolloutBatch,
    RolloutManager,
    apply_sample_transforms,
    build_batch_metadata,
    compute_response_lengths,
    convert_to_batch,
    extract_sample_fields,
    generate_rollout_batches,
)
from rollouts.training.rollout_gen.steps import RolloutConfig, RolloutStatistics, RolloutStep

__all__ = [
    "AsyncRolloutManager",
    "EpisodePool",
    "FailurePolicy",
    "Failures",
    "Filter",
    "Group",
    "GroupScorer",
    "Job",
    "Play",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutManager",
    "RolloutStatistics",
    "RolloutStep",
    "apply_sample_transforms",
    "build_batch_metadata",
    "compute_response_lengths",
    "convert_to_batch",
    "extract_sample_fields",
    "filter_group",
    "generate_rollout_batches",
    "group_samples",
    "group_scorer",
    "reward_metrics",
    "rollout_metrics",
    "run_episodes",
]
