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
from rollouts.training.loops.rl_loop import LoopState, StepReport, run_rl_training
from rollouts.training.loops.sft_loop import SFTTrainingConfig, run_sft_training
from rollouts.training.weight_sync import sync_weights

__all__ = [
    "LoopState",
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
