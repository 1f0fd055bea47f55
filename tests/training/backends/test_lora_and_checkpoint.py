"""Only adapters are trained. A checkpoint loads in transformers and peft, and the next step is bit-equal."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import threading

import pytest
import torch

from rollouts.errors import CheckpointError, ConfigError, ModelError, TrainingError
from rollouts.models import lora
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends.optimizer import TorchSettings, TrainerSettings
from rollouts.training.backends.sharding import whole_tensors
from rollouts.training.backends.torch import Executor, TorchBackend, create_torch_backend
from rollouts.training.backends.trainer import Trainer
from rollouts.training.batching import make_batch

PROBE = torch.arange(20)[None]


@pytest.fixture
def backend_of(tiny):
    made = []

    def make(model=None, rank=0, **settings):
        causal = copy.deepcopy(model) if model is not None else tiny.qwen3()
        adapter = None
        if rank:
            adapter = lora.add_lora(causal, rank=rank, alpha=None, targets="all-linear", seed=0)
        made.append(
            TorchBackend(
                Executor(Trainer(causal, {"main": GRPO}, TrainerSettings(**{"lr": 1e-2, **settings}), adapter=adapter))
            )
        )
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def batch(tiny):
    samples = tiny.make_samples()
    return make_batch(samples, [(-1.0) ** n for n in range(len(samples))], aggregation="token_mean", step=0)


def train(backend, batch, steps=2):
    for _ in range(steps):
        metrics = backend.forward_backward(batch).wait()
        del metrics["perf/tflops"], metrics["perf/peak_gib"]  # what a clock and the system say
        result = backend.optim_step().wait()
    return metrics, result


def logits(model):
    with torch.no_grad():
        return model(PROBE).logits


def same(one, other):
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_adapters_of_a_half_precision_model_are_float32(tiny, batch, tmp_path, dtype):
    tiny.qwen3().save_pretrained(tmp_path / "model")

    def create():
        return create_torch_backend(
            str(tmp_path / "model"),
            0,
            1,
            1e-2,
            4,
            1000,
            {"main": GRPO},
            None,
            settings=TorchSettings(dtype=dtype, device="cpu"),
        )

    backend = create()
    assert backend.model.dtype == getattr(torch, dtype)
    trained = backend._trainer._parameters  # in bfloat16 the masters
    assert trained and all(p.dtype == torch.float32 for p in trained)
    train(backend, batch)
    moments = [value for state in backend._trainer._optimizer.state.values() for value in state.values()]
    assert moments and all(value.dtype == torch.float32 for value in moments) and backend.version == 2
    backend.save(str(tmp_path / "checkpoint")).wait()
    other = create()
    other.load(str(tmp_path / "checkpoint")).wait()
    assert all(p.dtype == torch.float32 for p in other._trainer._parameters)
    assert same(other.get_weights("adapter").wait(), backend.get_weights("adapter").wait())
    backend.close()
    other.close()


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_only_adapters_are_trained(tiny, backend_of, batch, name):
    model = getattr(tiny, name)()
    backend = backend_of(model, rank=2)
    assert torch.allclose(logits(backend.model), logits(model)), "a fresh adapter changes nothing"
    before = {n: p.detach().clone() for n, p in backend.model.named_parameters()}
    assert backend._trainer.shares_prefix
    train(backend, batch)
    for parameter_name, parameter in backend.model.named_parameters():
        trained = "lora_" in parameter_name
        assert parameter.requires_grad == trained
        assert torch.equal(parameter, before[parameter_name]) != trained, parameter_name
    assert not torch.allclose(logits(backend.model), logits(model))


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_merged_weights_are_the_trained_model(tiny, backend_of, batch, name):
    model = getattr(tiny, name)()
    backend = backend_of(model, rank=2)
    train(backend, batch)
    before = logits(backend.model)
    merged = copy.deepcopy(model)
    merged.load_state_dict(backend.get_weights("full").wait())
    torch.testing.assert_close(logits(merged), before, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits(backend.model), before), "reading changes nothing"


def test_weights_travel_by_name(backend_of, batch):
    for rank in (0, 2):
        one, other = backend_of(rank=rank), backend_of(rank=rank)
        train(one, batch)
        kind = "adapter" if rank else "full"
        other.load_weights(one.get_weights(kind).wait()).wait()
        assert torch.equal(logits(one.model), logits(other.model))
        with pytest.raises(TrainingError, match="first nonsense"):
            other.load_weights({**one.get_weights(kind).wait(), "nonsense": torch.zeros(1)}).wait()
    with pytest.raises(TrainingError, match="no adapter"):
        backend_of().get_weights("adapter").wait()


def test_the_seed_decides_the_adapter(tiny):
    def first(seed):
        adapter = lora.add_lora(tiny.qwen3(), rank=2, alpha=None, targets="q_proj, v_proj", seed=seed)
        return lora.read_adapter_weights(adapter, functools.partial(whole_tensors, keep=True))

    state = torch.get_rng_state()
    assert same(first(1), first(1)) and not same(first(1), first(2))
    assert {name.split(".")[-3] for name in first(1)} == {"q_proj", "v_proj"}
    tiny.qwen3()  # sets the global seed; what add_lora leaves behind is what it found
    expected = torch.get_rng_state()
    lora.add_lora(tiny.qwen3(), rank=2, alpha=None, targets="all-linear", seed=5)
    assert torch.equal(torch.get_rng_state(), expected)
    torch.set_rng_state(state)


def test_targets_that_match_nothing_are_refused(tiny):
    with pytest.raises(ConfigError, match=r"'nope' match no layer of Qwen3ForCausalLM.*q_proj"):
        lora.add_lora(tiny.qwen3(), rank=2, alpha=None, targets="nope", seed=0)
    with pytest.raises(ConfigError, match="lora_rank is -1"):
        lora.add_lora(tiny.qwen3(), rank=-1, alpha=None, targets="all-linear", seed=0)


@pytest.mark.parametrize("rank", [0, 2])
def test_round_trip_is_bit_equal_with_the_next_step(tiny, backend_of, batch, tmp_path, rank):
    one = backend_of(rank=rank)
    train(one, batch)
    path = str(tmp_path / "checkpoints" / "step_000002")
    one.save(path).wait()
    other = backend_of(tiny.qwen3(), rank=rank)
    other.load(path).wait()
    assert other.version == 2
    kind = "adapter" if rank else "full"
    assert same(one.get_weights(kind).wait(), other.get_weights(kind).wait())
    assert train(one, batch) == train(other, batch)
    assert same(one.get_weights(kind).wait(), other.get_weights(kind).wait())
    # Control: without the optimizer's state the next step differs.
    fresh = backend_of(tiny.qwen3(), rank=rank)
    fresh.load(path).wait()
    fresh._trainer._optimizer.state.clear()
    train(fresh, batch)
    assert not same(one.get_weights(kind).wait(), fresh.get_weights(kind).wait())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_transformers_and_peft_load_it(tiny, backend_of, batch, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    full = backend_of()
    train(full, batch)
    full.save(str(tmp_path / "full")).wait()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "full").eval()), logits(full.model))
    adapted = backend_of(rank=2)
    train(adapted, batch)
    adapted.save(str(tmp_path / "adapter")).wait()
    loaded = PeftModel.from_pretrained(tiny.qwen3(), str(tmp_path / "adapter")).eval()
    assert torch.equal(logits(loaded), logits(adapted.model))
    assert not list((tmp_path / "adapter").glob("model*"))
    for file in (tmp_path / "full" / "model.safetensors", tmp_path / "adapter" / "adapter_model.safetensors"):
        assert file.stat().st_mode & 0o777 == file.parent.stat().st_mode & 0o666, "who may list the folder may read it"


def test_saving_again_replaces_and_leaves_nothing_beside(backend_of, batch, tmp_path):
    backend = backend_of()
    path = tmp_path / "last"
    backend.save(str(path)).wait()
    train(backend, batch)
    backend.save(str(path)).wait()
    assert json.loads((path / "manifest.json").read_text())["version"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_the_state_is_saved_as_it_was_when_the_save_was_asked_for(backend_of, tmp_path):
    backend, may_begin, state = backend_of(), threading.Event(), {"step": 1}
    backend.thread.submit(may_begin.wait)
    saved = backend.save(str(tmp_path / "last"), state)
    state["step"] = 2
    may_begin.set()
    saved.wait()
    assert backend.load(str(tmp_path / "last")).wait() == {"step": 1}


def test_a_write_that_fails_leaves_nothing(backend_of, tmp_path, monkeypatch):
    backend = backend_of()
    backend.save(str(tmp_path / "last")).wait()

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(CheckpointError, match="cannot be written: no space left"):
        backend.save(str(tmp_path / "last")).wait()
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]
    backend.load(str(tmp_path / "last")).wait()


def test_damaged_and_foreign_checkpoints_are_told(tiny, backend_of, tmp_path):
    backend = backend_of()
    good = tmp_path / "good"
    backend.save(str(good)).wait()

    def refused(error, words, change):
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        change(bad)
        with pytest.raises(error, match=words):
            backend.load(str(bad)).wait()

    refused(ConfigError, "there is no checkpoint", shutil.rmtree)
    refused(ConfigError, "did not finish", lambda folder: (folder / "manifest.json").unlink())
    refused(ConfigError, "cannot be read", lambda folder: (folder / "manifest.json").write_text("{"))
    refused(ConfigError, "model.safetensors has 100 bytes", lambda f: (f / "model.safetensors").write_bytes(b"x" * 100))
    refused(ConfigError, "state.json is missing", lambda folder: (folder / "state.json").unlink())
    shares = "trainer/__0_0.distcp"
    size = (good / shares).stat().st_size
    refused(ConfigError, f"{shares} .* checksum", lambda f: (f / shares).write_bytes(b"x" * size))
    with pytest.raises(ModelError, match="holds all weights, but this run trains a LoRA adapter"):
        backend_of(rank=2).load(str(good)).wait()
    with pytest.raises(ModelError, match="written by another model"):
        backend_of(tiny.qwen3(layers=1)).load(str(good)).wait()
    backend.load(str(good)).wait()


def test_another_optimizer_is_refused_and_nothing_is_changed(backend_of, batch, tmp_path):
    one, other = backend_of(), backend_of(optimizer="sgd")
    train(one, batch)
    one.save(str(tmp_path / "adamw")).wait()
    before = other.get_weights().wait()
    with pytest.raises(ConfigError, match=r"state of the optimizer AdamW, and this run uses SGD; give the --optimizer"):
        other.load(str(tmp_path / "adamw")).wait()
    assert same(before, other.get_weights().wait()) and other.version == 0
