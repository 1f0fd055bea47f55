"""The recorded values of tokens are those that were trained on, however rows are run."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from rollouts.training.algorithms.corrections import truncated
from rollouts.training.algorithms.recipes import DPO, GRPO, GSPO
from rollouts.training.backends.optimizer import TrainerSettings
from rollouts.training.backends.torch import Executor, TorchBackend
from rollouts.training.backends.trainer import Trainer
from rollouts.training.batching import make_batch


@pytest.fixture
def backend_of(tiny):
    made = []

    def make(algorithm, **settings):
        settings = TrainerSettings(**{"lr": 1e-2, "warmup_steps": 0, **settings})
        trainer = Trainer(copy.deepcopy(tiny.qwen3()), {"main": algorithm}, settings)
        made.append(TorchBackend(Executor(trainer)))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def batch_of(tiny, algorithm, **settings):
    """Groups with and without advantages, and a row that is not trained."""
    samples = tiny.make_samples(groups=3)
    advantages = [math.sin(3.0 * n + 1) if n > 3 else 0.0 for n in range(len(samples))]
    trained = [n != 6 for n in range(len(samples))]
    made = make_batch(samples, advantages, aggregation=algorithm.aggregation, step=0, trained=trained, **settings)
    made.record = True
    return made


def live(rows, stream_of):
    return [
        value
        for row in rows
        for value, weight in zip(stream_of(row), row.loss_mask, strict=True)
        if weight > 0
    ]  # fmt: skip


def recorded(batch):
    return {name: np.frombuffer(data, dtype=np.float32).tolist() for name, data in batch.recorded.items()}


@pytest.mark.parametrize("settings", [{}, {"tokens_per_microbatch": 60}, {"gradient_checkpointing": True}])
def test_values_are_those_of_a_forward_pass_before_the_step(tiny, backend_of, settings):
    backend, batch = backend_of(GRPO, **settings), batch_of(tiny, GRPO)
    before = backend.forward(batch, ("logprobs", "entropy")).wait()
    metrics = backend.forward_backward(batch).wait()
    found = recorded(batch)
    assert set(found) == {"logprob", "entropy", "clipped"}
    for name, streams in (("logprob", before.logprobs), ("entropy", before.entropy)):
        by_row = {id(row): stream for row, stream in zip(batch.rows, streams, strict=True)}
        expected = live(batch.rows, lambda row, by_row=by_row: by_row[id(row)])
        assert found[name] == pytest.approx(expected, abs=2e-5)
        assert len(set(expected)) > 20, "a test of equal values could not fail"
    # An independent formula: from the sampler's logprobs in the rows.
    ratios = np.exp(np.array(found["logprob"]) - live(batch.rows, lambda row: row.rollout_logprobs))
    advantages = np.array(live(batch.rows, lambda row: row.advantages))
    held = ((ratios < 0.8) & (advantages < 0)) | ((ratios > 1.2) & (advantages > 0))
    assert found["clipped"] == held.astype(float).tolist() and 0 < held.sum() < len(held)
    assert np.mean(found["clipped"]) == pytest.approx(metrics["policy/clip_low"] + metrics["policy/clip_high"])


def test_the_weights_of_a_correction(tiny, backend_of):
    algorithm = GRPO._replace(correction=truncated)
    backend, batch = backend_of(algorithm), batch_of(tiny, algorithm)
    batch.anchor = "current"
    metrics = backend.forward_backward(batch).wait()
    weights = recorded(batch)["weight"]
    assert np.mean(weights) == pytest.approx(metrics["mismatch/weight_mean"]) and len(set(weights)) > 5


def test_channels_without_a_value_are_absent(tiny, backend_of):
    """A loss of whole rollouts clips no token. A batch that does not ask, or has no live token, records nothing."""
    backend, batch = backend_of(GSPO), batch_of(tiny, GSPO)
    backend.forward_backward(batch).wait()
    assert set(batch.recorded) == {"logprob", "entropy"}
    silent = batch_of(tiny, GSPO)
    silent.record = False
    backend.forward_backward(silent).wait()
    empty = make_batch(tiny.make_samples(), [0.0] * 12, aggregation=GSPO.aggregation, step=0, trained=[False] * 12)
    empty.record = True
    backend.forward_backward(empty).wait()
    assert silent.recorded == empty.recorded == {}


def test_rows_in_two_pairs(tiny, backend_of):
    """The rows of a pair are copies, and each has its own values."""
    batch = batch_of(tiny, DPO, pairs=[(0, 1), (0, 2)])
    for row in batch.rows:
        row.ref_logprobs = [-1.0] * len(row.tokens)
    backend_of(DPO).forward_backward(batch).wait()
    found = recorded(batch)["logprob"]
    count = len(live(batch.rows[:1], lambda row: row.tokens))
    second = len(live(batch.rows[:2], lambda row: row.tokens))
    assert found[:count] == pytest.approx(found[second : second + count], abs=2e-5) and found[0] != 0.0
