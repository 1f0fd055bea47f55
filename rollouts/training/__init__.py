"""Training: from rollouts to new weights.

batches samples batching filters plain data: rows and batches, samples; filters of groups
algorithms/                      losses, advantages, aggregation, KL: pure functions on tensors
backends/                        a model with its optimizer
datasets/ rollout_gen/ loops/    the next task; concurrent rollouts; the training loops
weights/                         checkpoints, and new weights for engines, with a test that engines serve them
simple/                          plain calls: your own model, loss and loop

Loading models is in `rollouts.models`. The other modules here have names of these rooms under the module names of the
first notes. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face, moved_modules

if TYPE_CHECKING:
    from rollouts.config.sections import Config as Config
    from rollouts.config.sections import DataConfig as DataConfig
    from rollouts.config.sections import DeploymentConfig as DeploymentConfig
    from rollouts.config.sections import GPUConfig as GPUConfig
    from rollouts.config.sections import ModelConfig as ModelConfig
    from rollouts.config.sections import TrainingConfig as TrainingConfig
    from rollouts.loggers.base import MetricsLogger as MetricsLogger
    from rollouts.models.futures import ImmediateTrainFuture as ImmediateTrainFuture
    from rollouts.models.futures import TrainFuture as TrainFuture
    from rollouts.models.loading import load_hf_model as load_hf_model
    from rollouts.training.backends.fsdp import FSDPTrainingBackend as FSDPTrainingBackend
    from rollouts.training.backends.pytorch_factory import PyTorchTrainingBackend as PyTorchTrainingBackend
    from rollouts.training.backends.pytorch_factory import create_adamw_optimizer as create_adamw_optimizer
    from rollouts.training.backends.pytorch_factory import create_cross_entropy_loss as create_cross_entropy_loss
    from rollouts.training.backends.pytorch_factory import create_pytorch_backend as create_pytorch_backend
    from rollouts.training.backends.pytorch_factory import (
        create_warmup_cosine_scheduler as create_warmup_cosine_scheduler,
    )
    from rollouts.training.batches import TrainBatch as TrainBatch
    from rollouts.training.batches import TrainingBackend as TrainingBackend
    from rollouts.training.datasets.buffer import DataBuffer as DataBuffer
    from rollouts.training.datasets.dataset_loaders import load_dataset as load_dataset
    from rollouts.training.datasets.dataset_loaders import load_sft_dataset as load_sft_dataset
    from rollouts.training.datasets.dataset_loaders import load_sft_samples as load_sft_samples
    from rollouts.training.datasets.mixing import MixedBuffer as MixedBuffer
    from rollouts.training.datasets.mixing import Source as Source
    from rollouts.training.datasets.sft import collate_batch as collate_batch
    from rollouts.training.datasets.sft import compute_loss_mask as compute_loss_mask
    from rollouts.training.datasets.sft import prepare_sft_batch as prepare_sft_batch
    from rollouts.training.datasets.sft import tokenize_conversation as tokenize_conversation
    from rollouts.training.filters import check_any_success as check_any_success
    from rollouts.training.filters import check_min_reward as check_min_reward
    from rollouts.training.filters import check_quality_and_diversity as check_quality_and_diversity
    from rollouts.training.filters import check_reasonable_length as check_reasonable_length
    from rollouts.training.filters import check_response_diversity as check_response_diversity
    from rollouts.training.filters import check_reward_nonzero_std as check_reward_nonzero_std
    from rollouts.training.rollout_gen.endpoint import Endpoint as Endpoint
    from rollouts.training.rollout_gen.manager import AsyncRolloutManager as AsyncRolloutManager
    from rollouts.training.rollout_gen.rollout_generation import RolloutManager as RolloutManager
    from rollouts.training.rollout_gen.rollout_generation import apply_sample_transforms as apply_sample_transforms
    from rollouts.training.rollout_gen.rollout_generation import generate_rollout_batches as generate_rollout_batches
    from rollouts.training.rollout_gen.steps import RolloutBatch as RolloutBatch
    from rollouts.training.rollout_gen.steps import RolloutConfig as RolloutConfig
    from rollouts.training.rollout_gen.steps import build_batch_metadata as build_batch_metadata
    from rollouts.training.rollout_gen.steps import compute_response_lengths as compute_response_lengths
    from rollouts.training.rollout_gen.steps import convert_to_batch as convert_to_batch
    from rollouts.training.rollout_gen.steps import extract_sample_fields as extract_sample_fields
    from rollouts.training.samples import RLSample as RLSample
    from rollouts.training.simple.batches import compute_advantages as compute_advantages
    from rollouts.training.simple.batches import compute_reward as compute_reward
    from rollouts.training.simple.batches import prepare_grpo_batch as prepare_grpo_batch
    from rollouts.training.simple.configs import RLTrainingConfig as RLTrainingConfig
    from rollouts.training.simple.configs import SFTTrainingConfig as SFTTrainingConfig
    from rollouts.training.simple.losses import compute_grpo_loss as compute_grpo_loss
    from rollouts.training.simple.losses import grpo_loss as grpo_loss
    from rollouts.training.simple.losses import ppo_loss as ppo_loss
    from rollouts.training.simple.metrics import JSONLLogger as JSONLLogger
    from rollouts.training.simple.rl import run_rl_training as run_rl_training
    from rollouts.training.simple.sft import run_sft_training as run_sft_training
    from rollouts.training.simple.sharded import create_fsdp_backend as create_fsdp_backend
    from rollouts.training.weights.engines import InferenceEngine as InferenceEngine
    from rollouts.training.weights.engines import SGLangEngine as SGLangEngine
    from rollouts.training.weights.engines import VLLMEngine as VLLMEngine
    from rollouts.training.weights.engines import sync_weights_to_engines as sync_weights_to_engines
    from rollouts.training.weights.sync import WeightSyncManager as WeightSyncManager
    from rollouts.types import Sample as Sample
    from rollouts.types import Status as Status

__getattr__, __dir__ = lazy_face(__name__)
moved_modules(__name__, {"models": "rollouts.models.loading", "estimates": "rollouts.models.estimates"})
