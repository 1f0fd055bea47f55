"""The loops, pure functions over stateful parts: `rl_loop` (generate, train, sync) and `sft_loop`."""

from rollouts.training.loops.rl_loop import (
    PreparedBatch,
    RLTrainingConfig,
    StepReport,
    prepare_rl_batch,
    run_rl_training,
    sync_weights,
)
from rollouts.training.loops.sft_loop import SFTTrainingConfig, run_sft_training, take_batch

__all__ = [
    "PreparedBatch",
    "RLTrainingConfig",
    "SFTTrainingConfig",
    "StepReport",
    "prepare_rl_batch",
    "run_rl_training",
    "run_sft_training",
    "sync_weights",
    "take_batch",
]
