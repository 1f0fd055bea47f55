"""create_fsdp_backend in one line, and models that are sharded already."""

from __future__ import annotations

import pytest
import torch
import trio
from torch import nn

from rollouts.errors import ConfigError
from rollouts.training import (
    FSDPTrainingBackend,
    PyTorchTrainingBackend,
    Sample,
    SFTTrainingConfig,
    create_fsdp_backend,
    grpo_loss,
    run_sft_training,
)
from rollouts.training.algorithms import losses, recipes
from rollouts.training.batches import RankServer

SAMPLES = [Sample(tokens=[1, 2, 3, 4], loss_mask=[0.0, 1.0, 1.0, 1.0])] * 2


def test_it_trains_on_two_ranks(forked_ranks):
    backend = create_fsdp_backend("tiny", 1e-2, 2, processes=2, device="cpu")
    try:
        history = trio.run(run_sft_training, backend, SAMPLES, SFTTrainingConfig(2, 2))
    finally:
        backend.close()
    assert isinstance(backend, FSDPTrainingBackend) and backend.world_size == 2
    assert history[1]["loss"] < history[0]["loss"]


def test_it_takes_a_loss_function_and_an_algorithm(monkeypatch):
    """As create_pytorch_backend does, if every rank finds it again."""
    plans = []
    monkeypatch.setattr("rollouts.runs.jobs.train.make_training", plans.append)
    create_fsdp_backend("tiny", 1e-2, 2, losses.reinforce, processes=2, device="cpu")
    create_fsdp_backend("tiny", 1e-2, 2, recipes.GRPO, processes=1, device="cpu")
    first, second = (plan.schedule[0].algorithm for plan in plans)
    assert first.terms[0].function is losses.reinforce and second.advantage is recipes.GRPO.advantage
    with pytest.raises(ConfigError, match="these have none that another process finds: Algorithm\nwrite"):
        create_fsdp_backend("tiny", 1e-2, 2, recipes.GRPO, processes=2, device="cpu")


def test_a_rank_above_0_serves_and_ends(monkeypatch):
    served = []

    class Rank:
        def serve(self):
            served.append(True)

    assert isinstance(Rank(), RankServer)
    monkeypatch.setattr("rollouts.runs.jobs.train.make_training", lambda plan: Rank())
    with pytest.raises(SystemExit) as ended:
        create_fsdp_backend("tiny", 1e-2, 2, device="cpu")
    assert (ended.value.code, served) == (0, [True])


def test_settings_that_are_wrong():
    with pytest.raises(ConfigError, match="dtypes"):
        create_fsdp_backend("tiny", 1e-2, 2, dtypes="float32")


def test_a_model_that_is_sharded():
    class FullyShardedDataParallel(nn.Linear):
        pass

    model = nn.Sequential(FullyShardedDataParallel(2, 2))
    with pytest.raises(ConfigError, match=r"this model is sharded .* use rollouts\.training\.create_fsdp"):
        PyTorchTrainingBackend(model, torch.optim.SGD(model.parameters()), grpo_loss)
