"""train_sft: repeats the samples, and lowers the loss of the tiny model."""

from __future__ import annotations

import random

import pytest
import trio
from backend_fakes import BackendFields

from rollouts.models.futures import ImmediateTrainFuture
from rollouts.training.algorithms.recipes import SFT
from rollouts.training.backends.optimizer import TorchSettings
from rollouts.training.backends.torch import create_torch_backend
from rollouts.training.batches import StepResult
from rollouts.training.loops.sft import SFTSettings, train_sft
from rollouts.types import Sample


@pytest.fixture
def backend():
    made = create_torch_backend(
        "tiny", 0, 10, 1e-3, 0, 4096, {"main": SFT}, None, settings=TorchSettings(warmup_steps=1)
    )
    yield made
    made.close()


def test_it_lowers_the_loss(backend):
    generator = random.Random(0)
    samples = [
        Sample(tokens=[generator.randrange(100) for _ in range(12)], loss_mask=[0.0] * 4 + [1.0] * 8) for _ in range(4)
    ]
    reported, logged = [], []

    class Logger:
        def log(self, metrics, step):
            logged.append((step, metrics))

    async def on_step(step, metrics):
        reported.append(step)
        return {"sync/version": float(backend.version)}

    async def main():
        return await train_sft(backend, samples, SFTSettings(8, 4), Logger(), on_step=on_step)

    history = trio.run(main)
    losses = [metrics["policy/loss"] for metrics in history]
    assert losses[-1] < losses[0] - 0.5, losses
    assert reported == list(range(8))
    assert logged == list(enumerate(history))
    assert [metrics["sync/version"] for metrics in history] == list(range(1, 9))


def test_it_goes_on_where_it_stood():
    """The same batches as those of the whole run, from that step on; a step is logged before it is saved."""

    class Backend(BackendFields):
        def __init__(self):
            self.batches = []

        def forward_backward(self, batch):
            self.batches.append((batch.step, [row.tokens[0] for row in batch.rows]))
            return ImmediateTrainFuture({"policy/loss": 0.5})

        def optim_step(self):
            return ImmediateTrainFuture(StepResult({}, 1))

    class Logger:
        def log(self, metrics, step):
            events.append(("log", step))

    async def on_logged(step, metrics):
        events.append(("save", step, metrics["policy/loss"]))

    samples = [Sample(tokens=[number, 1], loss_mask=[0.0, 1.0]) for number in range(5)]
    batches = {}
    for first_step in (0, 2):
        backend, events = Backend(), []
        arguments = (backend, samples, SFTSettings(4, 2), Logger())
        history = trio.run(lambda a=arguments, f=first_step: train_sft(*a, on_logged=on_logged, first_step=f))
        assert len(history) == 4 - first_step
        batches[first_step] = backend.batches
    assert batches[2] == batches[0][2:] and batches[2][0][0] == 2
    assert events == [("log", 2), ("save", 2, 0.5), ("log", 3), ("save", 3, 0.5)]


def test_masked_tokens_are_not_learned(backend):
    """The control: with nothing live there is no step."""
    samples = [Sample(tokens=[1, 2, 3], loss_mask=[0.0, 0.0, 0.0])]

    async def main():
        return await train_sft(backend, samples, SFTSettings(2, 1))

    history = trio.run(main)
    assert [metrics["optim/skipped"] for metrics in history] == [1.0, 1.0]
    assert backend.version == 0


@pytest.mark.parametrize("wrong", [(-1, 1), (1, 0)])
def test_config_is_checked(wrong):
    with pytest.raises(AssertionError, match="must be"):
        SFTSettings(*wrong)


def test_rows_of_one_conversation_count_once():
    """Two rows of conversation 7, one of 3, one without a number: three rollouts of the same weight."""

    class Backend(BackendFields):
        def forward_backward(self, batch):
            self.batch = batch
            return ImmediateTrainFuture({})

        def optim_step(self):
            return ImmediateTrainFuture(StepResult({}, 1))

    samples = [Sample(tokens=[1, 2, 3], loss_mask=[0, 1, 1], rollout_index=number) for number in (7, 7, 3, None)]
    backend = Backend()
    config = SFTSettings(1, 4, "rollout_mean")
    trio.run(lambda: train_sft(backend, samples, config))
    assert [row.rollout_index for row in backend.batch.rows] == [0, 0, 1, 2] and backend.batch.denominator == 3
    assert [sum(row.weights) for row in backend.batch.rows] == [0.5, 0.5, 1.0, 1.0]
    assert samples[0].rollout_index == 7, "the samples are left as they are"
