"""Generation of many rollouts, from single episodes to whole training steps.

groups               all rollouts of one prompt: group rewards, filters, samples, their part of a checkpoint
pool                 concurrent episodes that can pause and resume; retries and the limit on failures
steps                the settings, the result and the metrics of a step
manager              GroupManager: the groups of a step, and prefetched steps

Groups of your own generate_fn, reward_fn or filter_fn are in the package `rollouts_notes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts_notes.manager import AsyncRolloutManager as AsyncRolloutManager
    from rollouts_notes.rollout_generation import RolloutManager as RolloutManager
    from rollouts_notes.rollout_generation import apply_sample_transforms as apply_sample_transforms
    from rollouts_notes.rollout_generation import generate_rollout_batches as generate_rollout_batches
    from rollouts_notes.rows import convert_to_batch as convert_to_batch

__getattr__, __dir__ = lazy_face(__name__)
