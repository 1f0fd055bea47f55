"""From samples and rewards to a batch of tensors, for your own loop.

    rewards = [compute_reward(sample) for sample in batch.samples]
    metrics = await backend.forward_backward(prepare_grpo_batch(batch, rewards, config)).result()

`run_rl_training` makes its own batches (`rollouts.training.loops.rl_batch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollouts.errors import TrainingError
from rollouts.types import Sample
from rollouts_notes.supervised import prepare_sft_batch

if TYPE_CHECKING:
    from torch import Tensor

    from rollouts.training.rollout_gen.steps import RolloutBatch


def compute_reward(sample: Sample) -> float:
    """1.0 if the sample's metadata has a true `correct`, else 0.0.

    >>> compute_reward(Sample(metadata={"correct": True})), compute_reward(Sample())
    (1.0, 0.0)
    """
    return 1.0 if sample.metadata.get("correct", False) else 0.0


def compute_advantages(rewards: Sequence[float], baseline: float = 0.0) -> list[float]:
    """Each reward minus the baseline. `rollouts.training.algorithms.advantages` has advantages that compare groups.

    >>> compute_advantages([1.0, 0.0], baseline=0.5)
    [0.5, -0.5]
    """
    return [reward - baseline for reward in rewards]


def prepare_grpo_batch(batch: RolloutBatch, rewards: Sequence[float], config: Any) -> dict[str, Tensor]:
    """`prepare_sft_batch` of the batch's samples, and `advantages` [B] from `config.baseline`.

    Raises TrainingError if the number of rewards is not that of the samples.
    """
    import torch

    if len(rewards) != len(batch.samples):
        raise TrainingError(f"{len(rewards)} rewards for {len(batch.samples)} samples; give one for each")
    advantages = compute_advantages(rewards, config.baseline or 0.0)
    return {**prepare_sft_batch(batch.samples), "advantages": torch.tensor(advantages, dtype=torch.float32)}
