"""Everything between rollouts and new weights.

types samples batching filters   plain data: samples, rows, batches; which groups are kept
algorithms/                      losses, advantages, aggregation, KL: pure functions on tensors
models backends/                 loading a model; holding it with its optimizer; futures, LoRA, checkpoints
datasets/ rollout_gen/ loops/    which task is next; many rollouts at once; generate, train, sync
weight_*                         new weights for the engines, as files or sent, and the proof that they arrived

Nothing is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.training.backends.futures import ImmediateTrainFuture, TrainFuture
    from rollouts.training.backends.pytorch_factory import (
        PyTorchTrainingBackend,
        create_adamw_optimizer,
        create_cross_entropy_loss,
        create_pytorch_backend,
        create_warmup_cosine_scheduler,
    )
    from rollouts.training.datasets.buffer import DataBuffer
    from rollouts.training.datasets.mixing import MixedBuffer, Source
    from rollouts.training.datasets.sft import collate_batch, prepare_sft_batch
    from rollouts.training.filters import (
        check_any_success,
        check_min_reward,
        check_quality_and_diversity,
        check_reasonable_length,
        check_response_diversity,
        check_reward_nonzero_std,
    )
    from rollouts.training.loops.rl_batch import RLTrainingConfig
    from rollouts.training.loops.rl_loop import run_rl_training
    from rollouts.training.loops.sft_loop import SFTTrainingConfig, run_sft_training
    from rollouts.training.models import load_hf_model
    from rollouts.training.rollout_gen.manager import AsyncRolloutManager
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
    from rollouts.training.rollout_gen.steps import RolloutConfig
    from rollouts.training.types import TrainBatch, TrainingBackend
    from rollouts.training.weight_engines import InferenceEngine, SGLangEngine, VLLMEngine, sync_weights_to_engines
    from rollouts.training.weight_sync import WeightSyncManager

__all__ = [
    "AsyncRolloutManager",
    "DataBuffer",
    "ImmediateTrainFuture",
    "InferenceEngine",
    "MixedBuffer",
    "PyTorchTrainingBackend",
    "RLTrainingConfig",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutManager",
    "SFTTrainingConfig",
    "SGLangEngine",
    "Source",
    "TrainBatch",
    "TrainFuture",
    "TrainingBackend",
    "VLLMEngine",
    "WeightSyncManager",
    "apply_sample_transforms",
    "build_batch_metadata",
    "check_any_success",
    "check_min_reward",
    "check_quality_and_diversity",
    "check_reasonable_length",
    "check_response_diversity",
    "check_reward_nonzero_std",
    "collate_batch",
    "compute_response_lengths",
    "convert_to_batch",
    "create_adamw_optimizer",
    "create_cross_entropy_loss",
    "create_pytorch_backend",
    "create_warmup_cosine_scheduler",
    "extract_sample_fields",
    "generate_rollout_batches",
    "load_hf_model",
    "prepare_sft_batch",
    "run_rl_training",
    "run_sft_training",
    "sync_weights_to_engines",
]

_HOMES = {
    "backends.futures": ("ImmediateTrainFuture", "TrainFuture"),
    "backends.pytorch_factory": (
        "PyTorchTrainingBackend",
        "create_adamw_optimizer",
        "create_cross_entropy_loss",
        "create_pytorch_backend",
        "create_warmup_cosine_scheduler",
    ),
    "datasets.buffer": ("DataBuffer",),
    "datasets.mixing": ("MixedBuffer", "Source"),
    "datasets.sft": ("collate_batch", "prepare_sft_batch"),
    "loops.rl_batch": ("RLTrainingConfig",),
    "loops.rl_loop": ("run_rl_training",),
    "loops.sft_loop": ("SFTTrainingConfig", "run_sft_training"),
    "models": ("load_hf_model",),
    "filters": (
        "check_any_success",
        "check_min_reward",
        "check_quality_and_diversity",
        "check_reasonable_length",
        "check_response_diversity",
        "check_reward_nonzero_std",
    ),
    "rollout_gen.manager": ("AsyncRolloutManager",),
    "rollout_gen.rollout_generation": (
        "RolloutBatch",
        "RolloutManager",
        "apply_sample_transforms",
        "build_batch_metadata",
        "compute_response_lengths",
        "convert_to_batch",
        "extract_sample_fields",
        "generate_rollout_batches",
    ),
    "rollout_gen.steps": ("RolloutConfig",),
    "types": ("TrainBatch", "TrainingBackend"),
    "weight_engines": ("InferenceEngine", "SGLangEngine", "VLLMEngine", "sync_weights_to_engines"),
    "weight_sync": ("WeightSyncManager",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__getattr__, __dir__ = lazy_face(__name__, _HOME_OF)
