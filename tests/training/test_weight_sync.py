"""sync_weights: who is given weights, what is measured, and that weights which did not arrive are seen."""

from __future__ import annotations

import math

import pytest
import torch
import trio

from rollouts.errors import InferenceError
from rollouts.training.backends.futures import ImmediateTrainFuture
from rollouts.training.types import ForwardOutput
from rollouts.training.weight_sync import parity_tolerance, probe_parity, sync_weights


class Backend:
    version = 7

    def __init__(self, dtype=torch.float32):
        self.fetched, self.dtype = 0, dtype

    def get_weights(self, kind):
        assert kind == "full"
        self.fetched += 1
        return ImmediateTrainFuture({"a": torch.zeros(3, dtype=self.dtype), "n": torch.zeros(2, dtype=torch.int64)})

    def forward(self, batch, needs):
        (row,) = batch.rows
        assert needs == ("logprobs",) and batch.temperature == 1.0
        return ImmediateTrainFuture(ForwardOutput(logprobs=[[0.0, *(-float(token) for token in row.tokens[1:])]]))


class Engine:
    context_tokens_max = 100

    def __init__(self, owns_weights=None, wrong=0.0):
        self.updates, self.wrong = [], wrong
        if owns_weights is not None:
            self.owns_weights = owns_weights

    async def update_weights(self, update):
        self.updates.append(update)

    async def score(self, tokens, temperature=1.0):
        self.tokens = tokens
        scores = [0.0, *(-float(token) for token in tokens[1:])]
        scores[-1] += self.wrong
        return scores


def sync(*engines, backend=None, **settings):
    async def main():
        return await sync_weights(backend or Backend(), engines, **settings)

    return trio.run(main)


def test_shared_parameters_are_told_the_version_only():
    backend, engines = Backend(), [Engine(), Engine(False)]
    metrics = sync(*engines, backend=backend)
    assert [[(u.version, u.weights) for u in engine.updates] for engine in engines] == [[(7, None)], [(7, None)]]
    assert metrics.keys() == {"sync/version", "sync/seconds"} and metrics["sync/version"] == 7.0
    assert backend.fetched == 0


def test_engines_with_weights_of_their_own_are_given_them_once_fetched_and_probed():
    backend, engines = Backend(), [Engine(True), Engine(), Engine(True, wrong=1e-4)]
    metrics = sync(*engines, backend=backend)
    assert backend.fetched == 1
    first, shared, last = (engine.updates[0].weights for engine in engines)
    assert first is last and first.keys() == {"a", "n"} and shared is None
    assert metrics["sync/bytes"] == 3 * 4 + 2 * 8
    assert metrics["sync/probe"] == pytest.approx(1e-4, rel=0.1)
    assert engines[0].tokens == list(range(32))


@pytest.mark.parametrize("wrong", [2e-3, math.nan])
def test_weights_that_did_not_arrive_are_seen(wrong):
    with pytest.raises(InferenceError, match=r"version 7 .* token 31 .* in the trainer") as caught:
        sync(Engine(True), Engine(True, wrong=wrong))
    assert f"{-31 + wrong:.6g} there and -31 in the trainer" in str(caught.value)


def test_the_tolerance_goes_by_the_type_of_the_weights():
    assert parity_tolerance({"a": torch.zeros(1), "n": torch.zeros(1, dtype=torch.int8)}) == 1e-3
    assert parity_tolerance({"a": torch.zeros(1, dtype=torch.bfloat16), "b": torch.zeros(1)}) == 5e-2
    halves = Backend(torch.bfloat16)
    assert sync(Engine(True, wrong=0.01), backend=halves)["sync/probe"] == pytest.approx(0.01, rel=0.1)
    with pytest.raises(InferenceError, match=r"at most 0\.001"):
        sync(Engine(True, wrong=0.01), backend=halves, tolerance=1e-3)


def test_the_probe_stays_within_a_small_vocabulary_and_context():
    engine = Engine(True)
    engine.vocabulary_size, engine.context_tokens_max = 5, 7
    assert trio.run(probe_parity, Backend(), engine) == 0.0
    assert engine.tokens == [0, 1, 2, 3, 4, 0, 1]
