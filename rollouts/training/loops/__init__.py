"""The loops, pure functions over stateful parts: `rl_loop` (generate, train, sync; its batches are made in `rl_batch`)
and `sft_loop`.
"""

from rollouts.training.loops.rl_batch import (
    PreparedBatch,
    RLTrainingConfig,
    complete_batch,
    estimate_advantages,
    prepare_rl_batch,
)
from rollouts.training.loops.rl_loop import StepReport, run_rl_training, sync_weights
from rollouts.training.loops.sft_loop import SFTTrainingConfig, run_sft_training

__all__ = [
    "PreparedBatch",
    "RLTrainingConfig",
    "SFTTrainingConfig",
    "StepReport",
    "complete_batch",
    "estimate_advantages",
    "prepare_rl_batch",
    "run_rl_training",
    "run_sft_training",
    "sync_weights",
]
