"""Episodes to samples, under the module name of the first notes."""

from __future__ import annotations

from rollouts.agent.episode import run_episode as run_episode
from rollouts.training.rollout_gen.groups import group_samples as group_samples
from rollouts.training.samples import episode_samples as episode_samples
