"""Counts compared with real models, memory with a real backend, and operations with torch's counter."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch.optim import optimizer as optim_hooks
from torch.utils.flop_counter import FlopCounterMode

from rollouts.errors import ConfigError
from rollouts.models.estimates import estimate_memory, model_size, model_size_of, peak_flops, train_flops
from rollouts.models.loading import TINY_PATH
from rollouts.models.lora import add_lora
from rollouts.training.algorithms.logprobs import CHUNK_ELEMENTS_MAX
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends.layers import wrap_layers
from rollouts.training.batching import make_batch

MODELS = ("qwen3", "untied qwen3", "llama", "gpt2", "gemma2")


def model_of(tiny, name):
    return tiny.qwen3(tied=False) if name == "untied qwen3" else getattr(tiny, name)()


def peft_model(causal, rank, targets="all-linear"):
    return add_lora(causal, rank=rank, alpha=None, targets=targets, seed=0)


# Counts


@pytest.mark.parametrize("name", MODELS)
def test_counts_without_weights_are_those_of_the_model(tiny, name):
    causal = model_of(tiny, name)
    size = model_size(causal.config)
    assert size == model_size_of(causal)
    assert size.parameters == size.trained == sum(p.numel() for p in causal.parameters())
    head, embedding = causal.get_output_embeddings().weight, causal.get_input_embeddings().weight
    assert size.tied == (head is embedding)
    assert (size.layers, size.hidden, size.vocabulary, size.head) == (2, 32, 61, head.numel())
    assert size.block * 2 == pytest.approx(size.parameters - size.head * (1 if size.tied else 2), rel=0.05)


def test_counts_by_hand(tiny):
    # Four heads of 8, two of keys; a feed-forward of 48; what multiplies: two layers and the head, tied or not.
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48
    for tied in (True, False):
        size = model_size(tiny.qwen3(tied=tied).config)
        assert size.matmul == 2 * layer + 61 * 32
        assert (size.attention_width, size.kv_width, size.tied) == (32, 16, tied)
    gpt2 = model_size(tiny.gpt2().config)  # its positions are looked up, its linear layers are transposed
    assert gpt2.matmul == 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128) + 61 * 32
    assert (gpt2.attention_width, gpt2.kv_width) == (32, 32)


def test_the_model_that_comes_with_rollouts():
    from transformers import AutoConfig, AutoModelForCausalLM

    real = AutoModelForCausalLM.from_pretrained(TINY_PATH)
    size = model_size(AutoConfig.from_pretrained(TINY_PATH))
    assert size == model_size_of(real)
    assert size.parameters == sum(p.numel() for p in real.parameters()) == 355_712


def test_a_token_visits_some_experts():
    from transformers import Qwen3MoeConfig

    def size(experts, visited):
        return model_size(
            Qwen3MoeConfig(
                vocab_size=61,
                hidden_size=32,
                moe_intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                num_experts=experts,
                num_experts_per_tok=visited,
                tie_word_embeddings=True,
            )
        )

    of_eight, all_eight = size(8, 2), size(8, 8)
    assert of_eight.parameters == all_eight.parameters
    assert all_eight.matmul - of_eight.matmul == 2 * 6 * 3 * 32 * 16


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.nightly), 4])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3", "all-linear"),
        ("untied qwen3", "all-linear"),
        ("llama", "q_proj,v_proj"),
        ("llama", "q_proj,embed_tokens"),
        ("qwen3", "layers.1.mlp.down_proj"),
        ("gpt2", "c_attn"),
    ],
)
def test_adapters_are_counted_as_peft_makes_them(tiny, name, targets, rank):
    causal = model_of(tiny, name)
    base = model_size(causal.config)
    size = model_size(causal.config, lora_rank=rank, lora_targets=targets)
    wrapped = peft_model(causal, rank, targets)
    assert size.trained == sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert size.parameters == sum(p.numel() for p in wrapped.parameters()) == base.parameters + size.trained
    assert size.lora and not base.lora
    if "embed" not in targets:
        assert size == model_size_of(causal)  # the adapters are in it now
        assert size.matmul == base.matmul + size.trained


def test_a_target_that_matches_nothing(tiny):
    with pytest.raises(ConfigError, match=r"'nothing' match no layer of .*q_proj"):
        model_size(tiny.qwen3().config, lora_rank=4, lora_targets="nothing")


# Operations


def counted_flops(causal, tokens, rows):
    counter = FlopCounterMode(display=False)
    ids = torch.randint(0, 61, (rows, tokens // rows))
    with counter:
        causal(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def eager(causal):
    causal.set_attn_implementation("eager")
    return causal


@pytest.mark.parametrize("name", ["qwen3", "untied qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("rows", [1, 8])
def test_operations_are_those_that_torch_counts(tiny, name, rows):
    causal = eager(model_of(tiny, name))
    found = train_flops(model_size_of(causal), 64, 64 * 64 / rows, lora=False)
    assert found == pytest.approx(counted_flops(causal, 64, rows), rel=0.02)


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.nightly), 8])
def test_operations_with_adapters(tiny, rank):
    causal = eager(tiny.qwen3(layers=6))
    peft_model(causal, rank)
    size = model_size_of(causal)
    counted = counted_flops(causal, 64, 2)
    assert train_flops(size, 64, 64 * 32, lora=True) == pytest.approx(counted, rel=0.05)
    assert train_flops(size, 64, 64 * 32, lora=False) > 1.2 * counted


def test_checkpointing_repeats_operations_that_are_not_counted(tiny):
    causal = eager(tiny.qwen3(layers=6))
    plain = counted_flops(causal, 64, 2)
    wrap_layers(causal, checkpoints=True)
    assert counted_flops(causal, 64, 2) > 1.2 * plain
    assert train_flops(model_size_of(causal), 64, 64 * 32, lora=False) == pytest.approx(plain, rel=0.02)


def test_tokens_that_are_not_scored_skip_the_head(tiny):
    size = model_size(tiny.qwen3().config)
    every, some = (train_flops(size, 10, 50, lora=False, scored=scored) for scored in (None, 4))
    assert every - some == 6 * 6 * size.head
    assert train_flops(size, 0, 0, lora=False) == 0.0


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 NVL", "float16", 835e12),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H200 NVL", "bfloat16", 835e12),
        ("NVIDIA GH200 480GB", "bfloat16", 989e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA A10", "bfloat16", 125e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("Tesla V100-PCIE-16GB", "float16", 112e12),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla T4", "float16", 65e12),
        ("Tesla T4", "bfloat16", None),
        ("AMD Instinct MI300X", "bfloat16", 1307.4e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA A10-8Q", "bfloat16", None),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA H200", "float64", None),
        ("AMD EPYC 9554 64-Core Processor", "float32", None),
        ("", "float32", None),
    ],
)
def test_peaks(name, dtype, expected):
    assert peak_flops(name, dtype) == expected


# Memory


@pytest.mark.parametrize(
    ("rank", "dtype", "optimizer"),
    [
        (0, "float32", "adamw"),
        (0, "float32", "sgd"),
        (0, "float64", "adamw"),
        (4, "float32", "adamw"),
        (4, "bfloat16", "adamw"),
        (0, "bfloat16", "adamw"),
    ],
)
def test_a_backend_holds_what_was_estimated(tiny, rank, dtype, optimizer):
    """Weights, gradients as the optimizer meets them, and its moments: within a hundredth, the tensors' own bytes."""
    from transformers import AutoConfig

    from rollouts.training.backends.optimizer import TorchSettings
    from rollouts.training.backends.torch import create_torch_backend

    seen = {}

    def before(step, args, kwargs):
        gradients = [p.grad for group in step.param_groups for p in group["params"] if p.grad is not None]
        seen["gradients"] = sum(gradient.nbytes for gradient in gradients)

    def after(step, args, kwargs):
        kept = [value for state in step.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        seen["optimizer"] = sum(value.nbytes for value in kept)

    hooks = [optim_hooks.register_optimizer_step_pre_hook(before)]
    hooks.append(optim_hooks.register_optimizer_step_post_hook(after))
    backend = create_torch_backend(
        "tiny",
        0,
        3,
        1e-3,
        rank,
        1024,
        {"main": GRPO},
        None,
        settings=TorchSettings(dtype=dtype, optimizer=optimizer, device="cpu"),
    )
    try:
        samples = tiny.make_samples()
        advantages = [math.sin(3.0 * n + 1) for n in range(len(samples))]
        backend.forward_backward(make_batch(samples, advantages, aggregation="token_mean", step=0)).wait()
        assert backend.optim_step().wait().version == 1
        masters = [p for p in backend._trainer._parameters if all(p is not own for own in backend.model.parameters())]
        seen["weights"] = sum(parameter.nbytes for parameter in (*backend.model.parameters(), *masters))
    finally:
        backend.close()
        for hook in hooks:
            hook.remove()
    size = model_size(AutoConfig.from_pretrained(TINY_PATH), lora_rank=rank)
    parts = estimate_memory(size, tokens=1024, dtype=dtype, optimizer=optimizer)
    for name, held in seen.items():
        assert parts[name] == pytest.approx(held, rel=0.01), name


def kept_bytes(causal, rows, columns):
    """What autograd keeps of the layers' forward: storages, each once, without weights."""
    own = {t.untyped_storage().data_ptr() for t in [*causal.parameters(), *causal.buffers()]}
    found, held = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # or another tensor would be given its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        causal(input_ids=torch.randint(0, 61, (rows, columns)), use_cache=False, logits_to_keep=1)
    gc.collect()
    return sum(found.values())


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("way", ["full", "lora", "checkpointed"])
@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("llama", "gpt2"))]
)
def test_activations_are_roughly_those_that_autograd_keeps(tiny, name, way, dtype):
    """Of the layers that are added, since the ends of so small a model are not what the estimate is for."""
    from transformers import AutoModelForCausalLM

    kept, estimated = [], []
    for layers in (2, 8):
        config = model_of(tiny, name).config
        config.num_hidden_layers = layers
        if hasattr(config, "layer_types"):
            config.layer_types = ["full_attention"] * layers
        causal = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
        if way == "lora":
            peft_model(causal, 2, "c_attn,c_proj,c_fc" if name == "gpt2" else "all-linear")
            causal.to(getattr(torch, dtype))  # as adapters with masters compute
        if way == "checkpointed":
            wrap_layers(causal, checkpoints=True)
        kept.append(kept_bytes(causal, 4, 64))
        parts = estimate_memory(
            model_size_of(causal), tokens=4 * 64, dtype=dtype, gradient_checkpointing=way == "checkpointed"
        )
        estimated.append(parts["activations"])
    assert estimated[1] - estimated[0] == pytest.approx(kept[1] - kept[0], rel=0.3)


def test_checkpointing_saves_activations_only(tiny):
    size = model_size(tiny.qwen3(layers=8).config)
    plain, saving = (estimate_memory(size, tokens=512, gradient_checkpointing=on) for on in (False, True))
    assert saving.pop("activations") < 0.3 * plain.pop("activations")
    assert saving == plain


def test_logits_are_of_one_chunk(tiny):
    size = model_size(tiny.qwen3().config)
    assert estimate_memory(size, tokens=10)["logits"] == 10 * 61 * 8
    many = CHUNK_ELEMENTS_MAX // 61 * 9
    assert estimate_memory(size, tokens=many)["logits"] == CHUNK_ELEMENTS_MAX * 8
    assert estimate_memory(size, tokens=many, dtype="bfloat16")["logits"] == CHUNK_ELEMENTS_MAX * 10
    assert estimate_memory(size, tokens=many, whole_logits=True)["logits"] == many * 61 * 20


def test_shards_divide_what_is_sharded(tiny):
    size = model_size(tiny.llama().config)
    settings = {"tokens": 64, "reference": True, "critic": size, "teacher": size, "cache_bytes": 5.0}
    one = estimate_memory(size, **settings)
    four = estimate_memory(size, **settings, shards=4, sharded=True, compute_dtype="bfloat16", engine_copy=True)
    for name in ("weights", "gradients", "optimizer", "reference", "critic"):
        assert four[name] == one[name] / 4
    assert one["weights"] == one["gradients"] == one["reference"] == one["optimizer"] / 2 == size.parameters * 4
    assert one["critic"] == size.parameters * 4 + (size.parameters - size.head) * 12  # its own head is frozen
    assert four["teacher"] == one["teacher"] == size.parameters * 4 and four["kv cache"] == one["kv cache"] == 5.0
    assert four["engine copy"] == size.parameters * 2 and one["engine copy"] == one["unsharded"] == 0.0
    assert four["activations"] == one["activations"] / 2
    # Two layers and both ends in two bytes; the larger's gradient in two and in four.
    assert four["unsharded"] == (2 * size.block + 2 * size.head) * 2 + max(size.block, 2 * size.head) * 6


def test_adapters_share_a_base(tiny):
    size = model_size(tiny.llama().config, lora_rank=2)
    parts = estimate_memory(size, tokens=64, dtype="bfloat16", reference=True, sharded=True, engine_copy=True)
    base = size.parameters - size.trained
    assert parts["weights"] == base * 2 + size.trained * 4
    assert parts["gradients"] == parts["reference"] == size.trained * 4
    assert parts["engine copy"] == base * 2
