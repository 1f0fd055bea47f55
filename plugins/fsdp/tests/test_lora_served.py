"""Numerics 18: served, merged and trained adapter are equal, in one process and sharded, and all change together."""

from __future__ import annotations

import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

from rollouts.inference.base import WeightUpdate
from rollouts.inference.embedded.hf import create_hf_inference
from rollouts.runs.export import export
from rollouts.training.batches import Row, TrainBatch
from rollouts.training.weights.sync import sync_weights

pytestmark = pytest.mark.slow

TOKENS = [5, 3, 17, 22, 60, 1, 0, 9, 41, 33]


def trainer_says(backend):
    zeros = [0.0] * len(TOKENS)
    batch = TrainBatch([Row(TOKENS, zeros, zeros, zeros, zeros, 0, 0)], 1.0, [0.0], 0)
    return backend.forward(batch).wait(60).logprobs[0]


def merged_says(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([TOKENS])).logits[0].float(), -1)
    return [0.0, *(float(logprobs[t, TOKENS[t + 1]]) for t in range(len(TOKENS) - 1))]


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_served_is_merged_is_trained(processes, tiny, ranks_of, tmp_path):
    tiny.qwen3().save_pretrained(tmp_path / "model")
    ranks = ranks_of(tmp_path / "model", processes, lora_rank=4)
    engine = create_hf_inference(str(tmp_path / "model"), ranks.backend, 0)
    batch = ranks.batch(tiny.make_samples(2, 3))
    said = {}

    async def look(when):
        metrics = await sync_weights(ranks.backend, [engine])
        ranks.backend.save(str(tmp_path / when)).wait(60)
        export(str(tmp_path / when), str(tmp_path / f"{when}-merged"))
        served = await engine.score(TOKENS)
        said[when] = (served, trainer_says(ranks.backend), merged_says(tmp_path / f"{when}-merged"))
        return metrics

    async def main():
        async with engine:
            await look("before")
            ranks.train(batch, 1)
            if processes:
                assert await engine.score(TOKENS) == said["before"][0], "served only after the update"
            return await look("after")

    metrics = trio.run(main)
    for served, trained, merged in said.values():
        assert served == pytest.approx(trained, abs=1e-5) and merged == pytest.approx(trained, abs=1e-4)
    for one, other in zip(said["before"], said["after"], strict=True):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-3, "each of them has moved"
    if processes:
        adapter = ranks.backend.get_weights("adapter").wait(60)
        assert metrics["sync/bytes"] == sum(each.nbytes for each in adapter.values()), "the adapter alone is sent"
    base = {name: value for name, value in engine.model.state_dict().items() if ".lora_" not in name}
    for name, value in tiny.qwen3().state_dict().items():
        own = base.get(name, base.get(name.replace(".weight", ".base_layer.weight")))
        assert torch.equal(own, value), "the base is as it was"


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_an_update_that_brings_the_wrong_thing(kind, tiny, ranks_of, tmp_path):
    from rollouts.errors import InferenceError

    tiny.qwen3().save_pretrained(tmp_path / "model")
    ranks = ranks_of(tmp_path / "model", 1, lora_rank=2 if kind == "adapter" else 0)
    engine = create_hf_inference(str(tmp_path / "model"), ranks.backend, 0)
    weights = ranks.backend.get_weights(kind).wait(60)
    some = next(iter(weights))
    other = "full" if kind == "adapter" else "adapter"
    for update, words in (
        (WeightUpdate(3), "brings none"),
        (WeightUpdate(3, other, weights=weights), f"takes {kind} weights, but the update has {other}"),
        (WeightUpdate(3, kind, weights={n: w for n, w in weights.items() if n != some}), f"1 names .* first {some}"),
        (WeightUpdate(3, kind, weights=weights | {some: weights[some][:1]}), f"1 names or shapes differ, first {some}"),
    ):
        with pytest.raises(InferenceError, match=words):
            trio.run(engine.update_weights, update)
        assert engine.version == 0
