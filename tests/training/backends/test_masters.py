"""Half-precision weights: layers compute in bfloat16, and everything that is kept is float32."""

from __future__ import annotations

import json

import pytest
import torch

from rollouts.errors import ConfigError
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends.optimizer import Masters, TorchSettings
from rollouts.training.backends.torch import create_torch_backend
from rollouts.training.batches import AuxiliaryModels
from rollouts.training.batching import make_batch


@pytest.fixture
def backend_of(tiny, tmp_path):
    made = []
    folder = tmp_path / "model"
    tiny.qwen3().save_pretrained(folder)

    def make(lora_rank=0, lr=1e-4, beside=None, **settings):
        chosen = TorchSettings(warmup_steps=0, device="cpu", **{"dtype": "bfloat16", **settings})
        arguments = (str(folder), 0, 10, lr, lora_rank, 16384, {"main": GRPO}, beside)
        made.append(create_torch_backend(*arguments, settings=chosen))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def batch_of(tiny):
    samples = tiny.make_samples(groups=2, prompt=(18, 20))
    return make_batch(samples, [(-1.0) ** n for n in range(8)], aggregation="token_mean", step=0)


def steps(backend, batch, count):
    for _ in range(count):
        backend.forward_backward(batch).wait()
        metrics = backend.optim_step().wait().metrics
    return metrics


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_small_steps_are_not_rounded_away(tiny, backend_of, lora_rank):
    """Each step is a hundredth of what bfloat16 tells apart; float32 says where they end."""
    batch = batch_of(tiny)
    half, single = backend_of(lora_rank, 1e-5), backend_of(lora_rank, 1e-5, dtype="float32")
    assert half.compute_dtype == "bfloat16" and single.compute_dtype == "float32"
    kind = "adapter" if lora_rank else "full"
    before = half.get_weights(kind).wait()
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    for backend in (half, single):
        steps(backend, batch, 20)
    after, expected = half.get_weights(kind).wait(), single.get_weights(kind).wait()
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before])
    wanted = torch.cat([(expected[name] - before[name]).flatten() for name in before])
    assert wanted.abs().max() > 1e-4
    assert torch.nn.functional.cosine_similarity(moved, wanted, dim=0) > 0.8
    # Control: what layers compute with has moved in few places only.
    computing = dict(half.model.named_parameters())
    assert all(p.dtype == torch.bfloat16 for p in computing.values())
    for parameter, master in half._trainer._masters._master.items():
        assert torch.equal(parameter.data, master.data.bfloat16())


def test_weights_keep_their_addresses(tiny, backend_of):
    backend = backend_of()
    before = {name: p.data_ptr() for name, p in backend.model.named_parameters()}
    steps(backend, batch_of(tiny), 2)
    backend.load_weights(backend.get_weights().wait()).wait()
    assert before == {name: p.data_ptr() for name, p in backend.model.named_parameters()}


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_checkpoint_has_the_masters(tiny, backend_of, tmp_path, lora_rank):
    batch, path = batch_of(tiny), str(tmp_path / "checkpoint")
    backend = backend_of(lora_rank)
    steps(backend, batch, 3)
    backend.save(path).wait()
    if not lora_rank:
        assert json.loads((tmp_path / "checkpoint" / "config.json").read_text())["dtype"] == "float32"
    again = backend_of(lora_rank)
    again.load(path).wait()
    for one in (backend, again):
        one.last = steps(one, batch, 2)
    assert backend.last == again.last
    kind = "adapter" if lora_rank else "full"
    one, other = backend.get_weights(kind).wait(), again.get_weights(kind).wait()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_gradients_accumulate_in_float32():
    weight = torch.nn.Parameter(torch.ones(3))
    masters = Masters(torch.bfloat16)
    masters.take([weight], convert=True)
    (master,) = masters.of([weight])
    for _ in range(512):
        (weight * torch.tensor([1.0, 1.0, 256.0])).sum().backward()
    assert weight.grad is None and master.grad.tolist() == [512.0, 512.0, 512.0 * 256]
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(512):  # control: in bfloat16 the sum stops at 256
        total += 1.0
    assert total == 256.0


def test_the_head_may_stay_float32(tiny, backend_of):
    backend = backend_of(fp32_head=True)
    dtypes = {name: p.dtype for name, p in backend.model.named_parameters()}
    assert dtypes["model.embed_tokens.weight"] == torch.float32, "it is tied to the head"
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    batch = batch_of(tiny)
    found = backend.forward(batch).wait().logprobs[0]
    assert found == pytest.approx(backend_of(dtype="float32").forward(batch).wait().logprobs[0], abs=0.3)
    assert steps(backend, batch, 2)["optim/skipped"] == 0.0


def test_a_reference_and_a_critic_follow_the_masters(tiny, backend_of, tmp_path):
    tiny.qwen3(seed=3).save_pretrained(tmp_path / "critic")

    def frozen():
        """The first model."""

    beside = AuxiliaryModels(reference=frozen, critic=str(tmp_path / "critic"))
    backend, batch = backend_of(beside=beside, lr=1e-2), batch_of(tiny)
    before = backend.forward(batch, ("logprobs", "values")).wait()
    steps(backend, batch, 2)
    after = backend.forward(batch, ("logprobs", "ref_logprobs", "values")).wait()
    assert after.ref_logprobs == before.logprobs != after.logprobs
    trunk = backend._trainer.networks.critic.trunk
    assert {p.dtype for p in trunk.parameters() if p.requires_grad} == {torch.bfloat16}
    for parameter, master in backend._trainer._masters._master.items():
        assert torch.equal(parameter.data, master.data.bfloat16()), "the policy is in place again"


def test_an_error_in_the_reference_leaves_the_policy_in_place(tiny, backend_of, monkeypatch):
    def frozen():
        """The first model."""

    backend, batch = backend_of(beside=AuxiliaryModels(reference=frozen), lr=1e-1), batch_of(tiny)
    steps(backend, batch, 2)
    before = backend.forward(batch).wait().logprobs
    right = backend._trainer._run_networks
    monkeypatch.setattr(backend._trainer, "_run_networks", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backend.forward(batch, ("ref_logprobs",)).wait()
    monkeypatch.setattr(backend._trainer, "_run_networks", right)
    assert backend.forward(batch).wait().logprobs == before


def test_masters_begin_with_what_is_stored(tiny, backend_of):
    """A model in float32 is not rounded to bfloat16 first."""
    stored = tiny.qwen3().state_dict()
    found = backend_of().get_weights().wait()
    assert all(torch.equal(found[name], stored[name]) for name in found)


def test_auto_is_float32_on_a_cpu(backend_of):
    assert backend_of(dtype="auto").compute_dtype == "float32"


def test_float16_is_refused(backend_of):
    with pytest.raises(ConfigError, match=r"overflows without a scaled loss; type --training\.dtype bfloat16"):
        backend_of(dtype="float16")
