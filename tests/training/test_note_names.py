"""The module paths of the first notes: each name is the same object there as in `rollouts.training`."""

from __future__ import annotations

import importlib

import pytest

import rollouts
from rollouts import training

PLACES = {
    "types": """Sample RLSample Status RolloutBatch RolloutConfig SFTTrainingConfig RLTrainingConfig TrainFuture
        ImmediateTrainFuture InferenceEngine TrainBatch TrainingBackend""",
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
    "backends": "PyTorchTrainingBackend create_pytorch_backend TrainFuture TrainingBackend",
    "backends.pytorch_factory": """create_pytorch_backend create_warmup_cosine_scheduler create_adamw_optimizer
        create_cross_entropy_loss""",
    "datasets": "DataBuffer",
    "datasets.data_buffer": "DataBuffer",
}


@pytest.mark.parametrize("place", PLACES)
def test_the_names_of_a_module(place):
    module = importlib.import_module(f"rollouts.training.{place}")
    for name in PLACES[place].split():
        assert getattr(module, name) is getattr(training, name), name


def test_older_imports_of_types_hold():
    from rollouts.training import batches, types

    names = "Row TrainBatch TrainingBackend StepResult ForwardOutput AuxiliaryModels RankServer".split()
    assert all(getattr(types, name) is getattr(batches, name) for name in names)
    assert types.Status is rollouts.Status and issubclass(types.Sample, rollouts.Sample)
