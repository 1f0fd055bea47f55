"""The module paths of the first notes: each name is the same object there as in `rollouts.training`."""

from __future__ import annotations

import importlib

import pytest

import rollouts
from rollouts import training

PLACES = {
    "types": """TrainingConfig Sample RLSample Status RolloutBatch RolloutConfig SFTTrainingConfig RLTrainingConfig
        TrainFuture ImmediateTrainFuture InferenceEngine TrainBatch TrainingBackend""",
    "rollout_generation": """generate_rollout_batches apply_sample_transforms convert_to_batch extract_sample_fields
        compute_response_lengths build_batch_metadata""",
    "sft_loop": "run_sft_training collate_batch prepare_sft_batch",
    "rl_loop": "run_rl_training compute_reward prepare_grpo_batch compute_advantages",
    "rl_losses": "grpo_loss ppo_loss compute_grpo_loss",
    "metrics": "MetricsLogger JSONLLogger",
    "data_buffer": "DataBuffer",
    "async_rollout_manager": "AsyncRolloutManager",
    "rollout_manager": "RolloutManager",
    "weight_sync": "InferenceEngine SGLangEngine VLLMEngine WeightSyncManager sync_weights_to_engines",
    "filters": """check_reward_nonzero_std check_any_success check_min_reward check_response_diversity
        check_reasonable_length check_quality_and_diversity""",
    "loops": "run_sft_training run_rl_training",
    "loops.sft_loop": "run_sft_training collate_batch prepare_sft_batch",
    "loops.rl_loop": "run_rl_training compute_reward prepare_grpo_batch compute_advantages",
    "rollout_gen": "AsyncRolloutManager generate_rollout_batches",
    "rollout_gen.async_rollout_manager": "AsyncRolloutManager",
    "rollout_gen.rollout_manager": "RolloutManager",
    "backends": "PyTorchTrainingBackend FSDPTrainingBackend create_pytorch_backend TrainFuture TrainingBackend",
    "backends.pytorch": "PyTorchTrainingBackend",
    "backends.fsdp": "FSDPTrainingBackend",
    "backends.protocol": "TrainingBackend",
    "backends.pytorch_factory": """create_pytorch_backend create_warmup_cosine_scheduler create_adamw_optimizer
        create_cross_entropy_loss""",
    "datasets": "DataBuffer load_sft_dataset",
    "datasets.sft": "compute_loss_mask tokenize_conversation prepare_sft_batch",
    "datasets.dataset_loaders": "load_dataset load_sft_dataset",
    "dataset_loaders": "load_dataset load_sft_dataset",
    "sample_prep": "compute_loss_mask tokenize_conversation",
    "sft": "compute_loss_mask tokenize_conversation",
    "datasets.data_buffer": "DataBuffer",
}


SECTION_7 = """
    Sample RLSample Status RolloutBatch RolloutConfig SFTTrainingConfig RLTrainingConfig TrainFuture
    ImmediateTrainFuture DataBuffer AsyncRolloutManager RolloutManager generate_rollout_batches apply_sample_transforms
    convert_to_batch extract_sample_fields compute_response_lengths build_batch_metadata run_sft_training
    run_rl_training compute_reward prepare_grpo_batch compute_advantages collate_batch prepare_sft_batch
    tokenize_conversation compute_loss_mask load_sft_dataset grpo_loss compute_grpo_loss ppo_loss TrainingBackend
    PyTorchTrainingBackend FSDPTrainingBackend create_pytorch_backend create_fsdp_backend load_hf_model
    create_adamw_optimizer create_cross_entropy_loss create_warmup_cosine_scheduler InferenceEngine SGLangEngine
    VLLMEngine WeightSyncManager sync_weights_to_engines MetricsLogger JSONLLogger check_reward_nonzero_std
    check_any_success check_min_reward check_response_diversity check_reasonable_length check_quality_and_diversity
    ModelConfig DataConfig TrainingConfig DeploymentConfig Config
"""


def test_the_names_of_training():
    missing = [name for name in SECTION_7.split() if name not in training.__all__ or not hasattr(training, name)]
    assert missing == []


@pytest.mark.parametrize("place", PLACES)
def test_the_names_of_a_module(place):
    module = importlib.import_module(f"rollouts.training.{place}")
    for name in PLACES[place].split():
        assert getattr(module, name) is getattr(training, name), name


def test_other_names():
    from rollouts.training.agent_integration import episode_samples, run_episode
    from rollouts.training.distributed_utils import is_sharded, place_of_this_process

    from rollouts.providers import Endpoint, SGLangEngine

    assert (Endpoint, SGLangEngine) == (rollouts.Endpoint, training.SGLangEngine)
    assert all(map(callable, (episode_samples, run_episode, is_sharded, place_of_this_process)))


def test_older_imports_of_types_hold():
    from rollouts.training import batches, types

    names = "Row TrainBatch TrainingBackend StepResult ForwardOutput AuxiliaryModels RankServer".split()
    assert all(getattr(types, name) is getattr(batches, name) for name in names)
    assert types.Status is rollouts.Status and issubclass(types.Sample, rollouts.Sample)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("primitives.algorithms", "AlgorithmConfig"),
        ("primitives.batches", "create_batch"),
        ("primitives.batches", "reward_of"),
        ("primitives.calls", "call_given"),
        ("primitives.kl", "compute_forward_kl"),
        ("primitives.rewards", "normalize_rewards"),
        ("primitives.servers", "vllm_generator"),
        ("primitives.tools", "parse_tools"),
        ("config.sections", "Config"),
        ("training.rl_losses", "label_logprobs"),
        ("training.dataset_loaders", "load_rows"),
    ],
)
def test_modules_that_are_now_parts_of_others(place, name):
    assert callable(getattr(importlib.import_module(f"rollouts.{place}"), name))
