"""Training: from rollouts to new weights.

batches samples batching filters plain data: rows and batches, samples; filters of groups
algorithms/                      losses, advantages, aggregation, KL: pure functions on tensors
backends/                        a model with its optimizer
datasets/ rollout_gen/ loops/    the next task; concurrent rollouts; the training loops
weights/                         checkpoints, and new weights for engines, with a test that engines serve them

Loading models is in `rollouts.models`. The plain calls, for your own model, loss and loop, are in the package
`rollouts_notes`; their names are here, and so are the module names of the first notes. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face, moved_modules

if TYPE_CHECKING:
    from rollouts_fsdp.backend import FSDPTrainingBackend as FSDPTrainingBackend
    from rollouts_notes.checkpoint_servers import InferenceEngine as InferenceEngine
    from rollouts_notes.checkpoint_servers import SGLangEngine as SGLangEngine
    from rollouts_notes.checkpoint_servers import VLLMEngine as VLLMEngine
    from rollouts_notes.checkpoint_servers import sync_weights_to_engines as sync_weights_to_engines
    from rollouts_notes.endpoint import Endpoint as Endpoint
    from rollouts_notes.loops import RLTrainingConfig as RLTrainingConfig
    from rollouts_notes.loops import SFTTrainingConfig as SFTTrainingConfig
    from rollouts_notes.loops import compute_reward as compute_reward
    from rollouts_notes.loops import prepare_grpo_batch as prepare_grpo_batch
    from rollouts_notes.loops import run_rl_training as run_rl_training
    from rollouts_notes.loops import run_sft_training as run_sft_training
    from rollouts_notes.manager import AsyncRolloutManager as AsyncRolloutManager
    from rollouts_notes.pytorch_factory import PyTorchTrainingBackend as PyTorchTrainingBackend
    from rollouts_notes.pytorch_factory import compute_grpo_loss as compute_grpo_loss
    from rollouts_notes.pytorch_factory import create_adamw_optimizer as create_adamw_optimizer
    from rollouts_notes.pytorch_factory import create_cross_entropy_loss as create_cross_entropy_loss
    from rollouts_notes.pytorch_factory import create_fsdp_backend as create_fsdp_backend
    from rollouts_notes.pytorch_factory import create_pytorch_backend as create_pytorch_backend
    from rollouts_notes.pytorch_factory import create_warmup_cosine_scheduler as create_warmup_cosine_scheduler
    from rollouts_notes.pytorch_factory import grpo_loss as grpo_loss
    from rollouts_notes.pytorch_factory import ppo_loss as ppo_loss
    from rollouts_notes.rollout_generation import RolloutManager as RolloutManager
    from rollouts_notes.rollout_generation import apply_sample_transforms as apply_sample_transforms
    from rollouts_notes.rollout_generation import generate_rollout_batches as generate_rollout_batches
    from rollouts_notes.rows import RLSample as RLSample
    from rollouts_notes.rows import RolloutBatch as RolloutBatch
    from rollouts_notes.rows import RolloutConfig as RolloutConfig
    from rollouts_notes.rows import build_batch_metadata as build_batch_metadata
    from rollouts_notes.rows import compute_response_lengths as compute_response_lengths
    from rollouts_notes.rows import convert_to_batch as convert_to_batch
    from rollouts_notes.rows import extract_sample_fields as extract_sample_fields
    from rollouts_notes.sections import Config as Config
    from rollouts_notes.sections import DataConfig as DataConfig
    from rollouts_notes.sections import DeploymentConfig as DeploymentConfig
    from rollouts_notes.sections import GPUConfig as GPUConfig
    from rollouts_notes.sections import ModelConfig as ModelConfig
    from rollouts_notes.sections import TrainingConfig as TrainingConfig
    from rollouts_notes.supervised import collate_batch as collate_batch
    from rollouts_notes.supervised import compute_advantages as compute_advantages
    from rollouts_notes.supervised import compute_loss_mask as compute_loss_mask
    from rollouts_notes.supervised import load_dataset as load_dataset
    from rollouts_notes.supervised import load_sft_dataset as load_sft_dataset
    from rollouts_notes.supervised import load_sft_samples as load_sft_samples
    from rollouts_notes.supervised import prepare_sft_batch as prepare_sft_batch
    from rollouts_notes.supervised import tokenize_conversation as tokenize_conversation

    from rollouts.loggers.base import MetricsLogger as MetricsLogger
    from rollouts.loggers.jsonl import JSONLLogger as JSONLLogger
    from rollouts.models.futures import ImmediateTrainFuture as ImmediateTrainFuture
    from rollouts.models.futures import TrainFuture as TrainFuture
    from rollouts.models.loading import load_hf_model as load_hf_model
    from rollouts.training.batches import TrainBatch as TrainBatch
    from rollouts.training.batches import TrainingBackend as TrainingBackend
    from rollouts.training.datasets.buffer import DataBuffer as DataBuffer
    from rollouts.training.datasets.mixing import MixedBuffer as MixedBuffer
    from rollouts.training.datasets.mixing import Source as Source
    from rollouts.training.filters import check_any_success as check_any_success
    from rollouts.training.filters import check_min_reward as check_min_reward
    from rollouts.training.filters import check_quality_and_diversity as check_quality_and_diversity
    from rollouts.training.filters import check_reasonable_length as check_reasonable_length
    from rollouts.training.filters import check_response_diversity as check_response_diversity
    from rollouts.training.filters import check_reward_nonzero_std as check_reward_nonzero_std
    from rollouts.training.weights.sync import WeightSyncManager as WeightSyncManager
    from rollouts.types import Sample as Sample
    from rollouts.types import Status as Status

__getattr__, __dir__ = lazy_face(__name__)

_ENGINE, _FSDP, _NOTES = __name__, "rollouts_fsdp", "rollouts_notes"
_HOMES = {
    f"{_ENGINE}.samples {_NOTES}.rows {_ENGINE}.rollout_gen.groups rollouts.agent.episode": "agent_integration",
    f"{_NOTES}.manager": "async_rollout_manager rollout_gen.async_rollout_manager",
    "rollouts.models.futures": "backends.futures",
    f"{_ENGINE}.batches rollouts.models.futures": "backends.protocol",
    f"{_NOTES}.pytorch_factory": "backends.pytorch backends.pytorch_factory rl_losses",
    f"{_ENGINE}.datasets.buffer": "data_buffer datasets.data_buffer",
    f"{_NOTES}.supervised": "dataset_loaders datasets.dataset_loaders datasets.sft sft sample_prep",
    f"{_FSDP}.rendezvous {_FSDP}.ranks {_NOTES}.pytorch_factory": "distributed_utils",
    f"{_FSDP}.backend": "backends.fsdp",
    f"{_FSDP}.heartbeats": "backends.heartbeats",
    f"{_FSDP}.ranks": "backends.ranks",
    f"{_FSDP}.rendezvous": "backends.rendezvous",
    "rollouts.models.estimates": "estimates",
    "rollouts_servers.broadcast": "weights.broadcast",
    f"{_NOTES}.loops {_NOTES}.supervised {_ENGINE}.loops.rl": "loops.rl_loop",
    f"{_NOTES}.loops {_NOTES}.supervised": "loops.sft_loop sft_loop rl_loop",
    "rollouts.loggers.base rollouts.loggers.jsonl": "metrics",
    "rollouts.models.loading": "models",
    f"{_NOTES}.endpoint": "rollout_gen.endpoint",
    f"{_NOTES}.rollout_generation": "rollout_gen.rollout_generation rollout_gen.rollout_manager rollout_manager",
    f"{_NOTES}.rollout_generation {_NOTES}.rows": "rollout_generation",
    f"rollouts.types {_ENGINE}.batches {_NOTES}.rows rollouts.models.futures"
    f" {_NOTES}.sections {_NOTES}.loops {_NOTES}.checkpoint_servers": "types",
    f"{_ENGINE}.weights.sync {_NOTES}.checkpoint_servers": "weight_sync",
}
moved_modules({f"{__name__}.{name}": home for home, names in _HOMES.items() for name in names.split()})
