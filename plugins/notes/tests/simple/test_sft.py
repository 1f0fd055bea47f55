"""run_sft_training as the first notes call it: samples with tensors, printed lines, checkpoints."""

from __future__ import annotations

import pytest
import torch
import trio

from rollouts.errors import ConfigError
from rollouts.training import (
    Sample,
    SFTTrainingConfig,
    create_cross_entropy_loss,
    create_pytorch_backend,
    create_warmup_cosine_scheduler,
    run_sft_training,
)
from rollouts.training.batches import Row, TrainBatch

SAMPLES = [Sample(input_ids=torch.tensor([1, 2, 3, at]), loss_mask=torch.tensor([0, 0, 1, 1])) for at in (4, 5, 6)]


def test_it_learns_prints_and_saves(backend_of, tmp_path, capsys):
    backend = backend_of(create_cross_entropy_loss(), lr=1.0)
    config = SFTTrainingConfig(num_steps=30, batch_size=2, log_every=20, checkpoint_every=10, learning_rate=2.0)
    history = trio.run(run_sft_training, backend, SAMPLES, config)
    assert history[-1]["loss"] < 1.0 < history[0]["loss"] and history[7]["step"] == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000010", "step_000020", "step_000030"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[:4] == ["Starting SFT training...", "  Samples: 3", "  Steps: 30", "  Batch size: 2"]
    first = history[0]
    assert printed[4] == f"Step 0: loss={first['loss']:.4f}, grad_norm={first['grad_norm']:.4f}, lr=2.0000e+00"
    assert printed[-1] == "Training complete!" and sum(line.startswith("Step") for line in printed) == 2


def test_samples_with_tensors_train_as_samples_with_lists(backend_of):
    """Also what the loop adds is only added: the weights are those of the engine's loop."""
    from rollouts.training.loops import sft

    ours, theirs = backend_of(create_cross_entropy_loss()), backend_of(create_cross_entropy_loss())
    lists = [Sample(tokens=each.tokens, loss_mask=each.loss_mask.tolist()) for each in SAMPLES]
    trio.run(run_sft_training, ours, SAMPLES, SFTTrainingConfig(3, 2))
    trio.run(sft.train_sft, theirs, lists, sft.SFTSettings(3, 2))
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_learning_rate_beside_a_scheduler(backend_of):
    backend = backend_of(create_cross_entropy_loss())
    backend.scheduler = create_warmup_cosine_scheduler(backend.optimizer, 1, 10)
    with pytest.raises(
        ConfigError,
        match="a scheduler sets its learning rate; make the backend with this rate, or leave learning_rate out",
    ):
        trio.run(run_sft_training, backend, SAMPLES, SFTTrainingConfig(1, 1, learning_rate=1.0))
    with pytest.raises(ConfigError, match="SFTTrainingConfig: checkpoint_every is -2"):
        SFTTrainingConfig(1, 1, checkpoint_every=-2)


def test_the_plain_backend_scores_as_the_runs_backend(backend_of):
    rows = [
        Row([1, 2, 3, 4], [0.0, 1.0, 0.0, 1.0], [], [0.0] * 4, None, 0, 0),
        Row([7, 8], [0.0, 1.0], [], [0.0] * 2, None, 1, 1),
    ]
    batch = TrainBatch(rows, 1.0, [], 0, temperature=0.5)
    theirs = create_pytorch_backend("tiny", 1e-3, 1, "sft")
    ours = backend_of(create_cross_entropy_loss(), theirs.model)
    try:
        for only_live in (False, True):
            mine = ours.forward(batch, ("logprobs", "entropy"), only_live=only_live).wait()
            other = theirs.forward(batch, ("logprobs", "entropy"), only_live=only_live).wait()
            for name in ("logprobs", "entropy"):
                for row, expected in zip(getattr(mine, name), getattr(other, name), strict=True):
                    assert row == pytest.approx(expected, abs=1e-5)
        assert ours.model_files.causal is theirs.model and ours.compute_dtype == theirs.compute_dtype == "float32"
    finally:
        theirs.close()
