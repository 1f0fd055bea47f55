"""Layers that are compiled, and that compute their activations again, have the same gradients."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from rollouts.models.lora import add_lora
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends import layers, transformer
from rollouts.training.backends.layers import Compilations, wrap_layers
from rollouts.training.backends.optimizer import TrainerSettings
from rollouts.training.backends.torch import Executor, TorchBackend
from rollouts.training.backends.trainer import Trainer
from rollouts.training.batching import make_batch
from rollouts.training.forest import budget_for, node_budgets

# Tests make warnings errors, and torch's compiler warns about torch itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")


@pytest.fixture(autouse=True)
def compiler(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp().parent / "inductor"))
    yield
    torch._dynamo.reset()


@pytest.fixture
def backend_of():
    made = []

    def make(model, *, lora_rank=0, **settings):
        causal = copy.deepcopy(model)
        adapter = add_lora(causal, rank=lora_rank, alpha=None, targets="all-linear", seed=0) if lora_rank else None
        chosen = TrainerSettings(lr=1e-2, warmup_steps=0, dtype="float32", **settings)
        made.append(TorchBackend(Executor(Trainer(causal, {"main": GRPO}, chosen, adapter=adapter))))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def batch_of(tiny, groups=2):
    samples = tiny.make_samples(groups=groups, prompt=(18, 20))
    return make_batch(samples, [(-1.0) ** n for n in range(4 * groups)], aggregation="token_mean", step=0)


def gradient_of(backend, batch):
    metrics = backend.forward_backward(batch).wait()
    gradient = torch.cat([p.grad.flatten() for p in backend.model.parameters() if p.grad is not None])
    backend._trainer.forget_gradients()
    return gradient, metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"gradient_checkpointing": True}, {"lora_rank": 4}, {"memory_budget": 0.5}], ids=str
)
def test_compiled_layers_have_the_same_gradient(tiny, backend_of, settings):
    """With Inductor. Layers have one shape, so what is compiled for the first one serves all, and the next batches."""
    model, batch = tiny.qwen3(layers=4, tied=False), batch_of(tiny)
    expected, _ = gradient_of(backend_of(model), batch)
    backend = backend_of(model, compile="layers", **settings)
    if settings.get("lora_rank"):
        expected, _ = gradient_of(backend_of(model, **settings), batch)
    found, metrics = gradient_of(backend, batch)
    assert metrics["perf/compilation_failed"] == 0.0, backend.notes
    # Blocks of branches are a graph break, and torch compiles no checkpoint with one: such layers run as they are.
    assert (0 < metrics["perf/compilations"] <= 16) or settings.get("gradient_checkpointing")
    assert metrics["perf/pad_frac"] > 0, "nodes are padded to a budget"
    assert (found - expected).norm() <= 1e-4 * expected.norm()
    for groups in (1, 3):
        _, metrics = gradient_of(backend, batch_of(tiny, groups))
        assert metrics["perf/compilations"] == 0.0
    assert not any("compiled" in note for note in backend.notes)


def test_a_compilation_that_fails_is_told_and_layers_run_as_they_are(tiny, backend_of, monkeypatch):
    def refuse(run, **how):
        from torch._dynamo.exc import Unsupported

        def compiled(*args, **settings):
            raise Unsupported("no such operation")

        return compiled

    model, batch = tiny.qwen3(), batch_of(tiny)
    expected, _ = gradient_of(backend_of(model), batch)
    monkeypatch.setattr(torch, "compile", refuse)
    backend = backend_of(model, compile="layers")
    for _ in range(2):
        found, metrics = gradient_of(backend, batch)
        assert metrics["perf/compilation_failed"] == 1.0
        assert (found - expected).norm() <= 1e-5 * expected.norm()
    (note,) = [note for note in backend.notes if "not compiled" in note]
    assert note == "warning: layers are not compiled: Unsupported: no such operation"


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_whole_layer_is_one_graph_and_the_limit_of_variants_is_a_failure(tiny, backend_of, monkeypatch, checkpoints):
    """Dense attention, which has no graph break, as on a GPU."""
    monkeypatch.setattr(layers, "_VARIANTS_MAX", 2)
    model = tiny.qwen3(layers=4, tied=False)
    backend = backend_of(model, compile="layers", gradient_checkpointing=checkpoints)
    models = backend._trainer._models
    backend._trainer._models = models._replace(paths=models.paths._replace(way="dense", budgets=()))
    found = []
    for length in (18, 18, 30, 40, 41):
        samples = tiny.make_samples(groups=1, rollouts=1, prompt=(length, length), seed=length)
        batch = make_batch(samples, [1.0], aggregation="token_mean", step=0)
        found.append(backend.forward_backward(batch).wait())
    assert [metrics["perf/compilations"] for metrics in found] == [1, 0, 1, 0, 0]
    assert [metrics["perf/compilation_failed"] for metrics in found] == [0, 0, 0, 1, 1]
    assert backend.notes[-1].endswith("a layer would be compiled for more than 2 shapes")


@pytest.mark.slow
def test_flex_attention_in_compiled_layers_is_compiled_once(tiny):
    """Forward only, because a CPU has no backward pass. New masks of one shape compile nothing."""
    model = tiny.qwen3(layers=3)
    compilations = Compilations()
    wrap_layers(model, checkpoints=False, compilations=compilations)
    plain = transformer.inspect_model(model)
    flex = plain._replace(way="flex", budgets=(256,))
    found = []
    for number in range(3):
        rows = [[*range(30), *[member] * (10 + number)] for member in range(3 + number)]
        inputs = transformer.make_inputs(rows, [np.arange(1, len(row)) for row in rows])
        with torch.no_grad(), plain.attending():
            expected, _ = transformer.run_features(plain, inputs)
            compilations.is_on = True
            features, _ = transformer.run_features(flex, inputs)
            compilations.is_on = False
        torch.testing.assert_close(features, expected, rtol=0, atol=1e-4)
        found.append(compilations.new())
    assert sum(found) <= 2 and found[-1] == 0 and not compilations.failure


def test_an_engine_gets_the_plain_layers(tiny, monkeypatch):
    """It runs the same layers with a cache, without a forest."""
    calls = []
    monkeypatch.setattr(
        torch, "compile", lambda run, **how: lambda *args, **settings: calls.append(1) or run(*args, **settings)
    )
    model = tiny.qwen3()
    compilations = Compilations()
    wrap_layers(model, checkpoints=True, compilations=compilations)
    compilations.is_on = True
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True)
    assert not calls


def test_budgets_are_few():
    assert node_budgets(16384) == (2048, 4096, 8192, 16384)
    assert node_budgets(100) == (128, 128, 128, 128)
    assert [budget_for(count, (128, 256)) for count in (1, 128, 129, 256, 257, 600)] == [128, 128, 256, 256, 384, 640]
    assert budget_for(77, ()) == 77


def test_a_deep_copy_runs_its_own_layers(tiny):
    model = tiny.qwen3()
    wrap_layers(model, checkpoints=True, compilations=Compilations())
    twin = copy.deepcopy(model)
    ids = torch.arange(10)[None]
    before = twin(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert torch.equal(twin(input_ids=ids, use_cache=False).logits, before)
