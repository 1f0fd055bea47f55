"""Estimates of a model's size, a step's operations and memory: arithmetic on shapes, before any weights are loaded.

All numbers are per rank; in bytes, parameters, and operations per token. docs/memory-and-speed.md has the formulas and
their limits. Not here: names of models and settings of runs (`rollouts.runs.dry_run`).

    >>> round(train_flops(ModelSize(110, 110, 100, 2, 8, 8, 4, 10, False), tokens=1, products=5, lora=False))
    1560
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__rollouts_memory__"

# The logits of one chunk in a loss: 2**26 fp32 numbers are 256 MiB, or 441 rows of 151,936. Each chunk reads the head's
# weight; chunks of a quarter of this size took a quarter more time. Logits of at most this size are one chunk, so
# nothing is computed twice.
CHUNK_ELEMENTS_MAX = 1 << 26

_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

_MOMENTS = {"adamw": 2, "sgd": 1, "adafactor": 0}

# Dense peaks in teraflops from the vendors' data sheets: (bfloat16, float16, float32 without TF32). None: tensor cores
# do not support the dtype. Most data sheets print twice as much, "with sparsity". The first matching name counts.
_PEAKS: tuple[tuple[str, tuple[float | None, float | None, float]], ...] = (
    (r"A100", (312, 312, 19.5)),
    (r"H100\b.*\bPCIe", (756, 756, 51)),
    (r"H[12]00\b.*\bNVL", (835, 835, 60)),
    (r"H100|G?H200", (989, 989, 67)),
    (r"GB200", (2500, 2500, 80)),
    (r"B200", (2250, 2250, 75)),
    (r"L4", (121, 121, 30.3)),
    (r"L40S", (362, 362, 91.6)),
    (r"A10", (125, 125, 31.2)),
    (r"RTX 4090(?! (?:D|Laptop)\b)", (165.2, 165.2, 82.6)),
    (r"V100S", (None, 130, 16.4)),
    (r"V100\b.*\bPCIe", (None, 112, 14)),
    (r"V100", (None, 125, 15.7)),
    (r"T4", (None, 65, 8.1)),
    (r"MI300X", (1307.4, 1307.4, 163.4)),
)
_PEAK_DTYPES = ("bfloat16", "float16", "float32")
_PART = r"\bMIG\b|-\d+[ABCQ]\b"  # a part of a GPU, or a virtual one: `A100-SXM4-40GB MIG 1g.5gb`, `A10-8Q`


def moments_of(optimizer: str) -> int:
    """How many numbers an optimizer stores for each trained one: two, for one that is not known. Adafactor stores a row
    and a column of each matrix, which is almost nothing.

    >>> moments_of("sgd"), moments_of("lion")
    (1, 2)
    """
    return _MOMENTS.get(optimizer, 2)


class ModelSize(NamedTuple):
    """The numbers of a causal language model that determine memory and operations.

    Attributes:
        parameters: the number of all parameters, with adapters; a tied one counts once
        trained: the number of parameters with gradients
        matmul: the number of parameters that a token is multiplied by: linear layers and the output head (a tied one
            too), but not an embedding table; of experts, as many as a token uses
        hidden: size of the embedding
        attention_width: heads x head size
        kv_width: key heads x head size
        vocabulary: rows of the embedding
    """

    parameters: int
    trained: int
    matmul: int
    layers: int
    hidden: int
    attention_width: int
    kv_width: int
    vocabulary: int
    tied: bool

    @property
    def head(self) -> int:
        """The output head's parameters."""
        return self.vocabulary * self.hidden

    @property
    def block(self) -> int:
        """The parameters of one layer: all that are neither embedding nor head, divided by the layers."""
        return (self.parameters - self.head * (1 if self.tied else 2)) // max(1, self.layers)

    @property
    def lora(self) -> bool:
        """Whether only a part of the parameters is trained."""
        return self.trained < self.parameters


def model_size(config: Any, *, lora_rank: int = 0, lora_targets: str = "all-linear") -> ModelSize:
    """The size of the model that a transformers config describes, with adapters of `lora_rank` if it is above 0. Needs
    no memory for weights.

    Raises ConfigError if no layer matches `lora_targets`, or one with a tied weight does; and what transformers raises
    for the config of another kind of model.
    """
    import torch

    from rollouts.models.loading import one_at_a_time

    with one_at_a_time(), torch.device("meta"):
        from transformers import AutoModelForCausalLM

        causal: Any = AutoModelForCausalLM.from_config(config)
        if lora_rank:
            from rollouts.models.lora import add_lora

            add_lora(causal, rank=lora_rank, alpha=None, targets=lora_targets, seed=0)
    return model_size_of(causal)


def model_size_of(causal: Any) -> ModelSize:
    """The size of a loaded causal LM, with its adapters. What requires a gradient is trained. A sharded model counts as
    a whole.
    """
    from torch import nn

    config = causal.config.get_text_config(decoder=True)
    looked_up = {id(m.weight) for m in causal.modules() if isinstance(m, nn.Embedding)}
    named = {id(p): p for p in causal.parameters()}
    multiplied = [p for key, p in named.items() if p.ndim >= 2 and key not in looked_up]
    ends = (causal.get_input_embeddings(), causal.get_output_embeddings())
    embedding, head = (m.get_base_layer() if hasattr(m, "get_base_layer") else m for m in ends)  # inside an adapter
    tied = head is not None and head.weight is embedding.weight
    vocabulary, hidden = embedding.weight.shape
    heads = int(config.num_attention_heads)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return ModelSize(
        parameters=sum(p.numel() for p in named.values()),
        trained=sum(p.numel() for p in named.values() if p.requires_grad),
        matmul=round(sum(p.numel() * _visited(p, config) for p in multiplied)) + (head.weight.numel() if tied else 0),
        layers=int(config.num_hidden_layers),
        hidden=int(hidden),
        attention_width=heads * head_size,
        kv_width=int(getattr(config, "num_key_value_heads", None) or heads) * head_size,
        vocabulary=int(vocabulary),
        tied=tied,
    )


def train_flops(size: ModelSize, tokens: float, products: float, *, lora: bool, scored: float | None = None) -> float:
    """Floating-point operations of forward and backward pass over `tokens`, without the operations that checkpointing
    repeats. `products` are those of a query with a key, per head and layer: l (l + 1) / 2 for a causal sequence of
    length l. Model-flops utilization is this number per second, divided by the peak.

    A token takes 6 N: one multiplication and one addition for each of N matmul parameters, in the forward pass and
    twice in the backward pass (gradients of inputs and of weights). A product takes 12 L W: the same for queries with
    keys and attention weights with values, in L layers of width W (Chowdhery et al. 2022, PaLM, appendix B; but only
    what the causal mask leaves counts, which is half, as in prime-rl and torchtitan). With LoRA there are no gradients
    of base weights: 4 N + 2 R, where R of the N parameters are adapters. Only `scored` tokens (None: all) run through
    the output head.
    """
    scored = tokens if scored is None else scored
    passes = 4 if lora else 6
    weights = passes * ((size.matmul - size.head) * tokens + size.head * scored)
    adapters = 2 * size.trained * tokens if lora else 0
    return float(weights + adapters + 12 * size.layers * size.attention_width * products)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """The peak operations per second of a device (named as by torch.cuda.get_device_name) on dense matrices of
    bfloat16, float16 or float32 (without TF32). None if unknown: a CPU, a part of a GPU, another dtype.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
    989000000000000.0
    """
    if dtype not in _PEAK_DTYPES or re.search(_PART, device_name):
        return None
    for pattern, peaks in _PEAKS:
        if re.search(rf"\b(?:{pattern})\b", device_name, re.IGNORECASE):
            teraflops = peaks[_PEAK_DTYPES.index(dtype)]
            return None if teraflops is None else teraflops * 1e12
    return None


def estimate_memory(
    size: ModelSize,
    *,
    tokens: int,
    dtype: str = "float32",
    compute_dtype: str = "",
    optimizer: str = "adamw",
    shards: int = 1,
    sharded: bool = False,
    gradient_checkpointing: bool = False,
    reference: bool = False,
    critic: ModelSize | None = None,
    teacher: ModelSize | None = None,
    engine_copy: bool = False,
    whole_logits: bool = False,
    cache_bytes: float = 0.0,
) -> dict[str, float]:
    """Bytes of the largest rank, by part; 0 for parts that do not exist.

    Weights have `dtype`; trained weights, gradients and moments are at least float32.

    Args:
        tokens: the most tokens of a microbatch
        sharded: the model is sharded over `shards` ranks (FSDP); whole layers are in `compute_dtype` (empty: `dtype`),
            and gradients are added up in float32
        critic: the critic, if it is a separate model
        teacher: the teacher model
        engine_copy: an engine has a copy of the whole model
        cache_bytes: the cache of an engine in this process
    """
    weight = _DTYPE_BYTES[dtype]
    compute = _DTYPE_BYTES[compute_dtype or dtype]
    trained = max(4, weight)
    masters = weight if weight < 4 and not sharded else 0  # a trained weight is there twice: it, and its master
    moments = moments_of(optimizer)
    share = shards if sharded else 1
    running = _activations(size, tokens, compute, gradient_checkpointing)
    # A chunk and a work buffer of the same size, in float32; a third one if the head has another dtype. Of whole
    # logits: the head's, the divided ones in float32, their log-probabilities, and the gradients of both.
    numbers = float(tokens * size.vocabulary)
    logits = min(numbers, CHUNK_ELEMENTS_MAX) * (8 + (compute if compute < 4 else 0))
    if whole_logits:
        logits = numbers * (2 * compute + 3 * 4)
    beside = 0.0
    if critic is not None:
        running += _activations(critic, tokens, compute, gradient_checkpointing)
        learns = critic.parameters - (0 if critic.tied else critic.head)  # its own head computes no logits
        beside = trained * (critic.parameters + learns * (1 + moments)) / share
    return {
        "weights": ((size.parameters - size.trained) * weight + size.trained * (trained + masters)) / share,
        "gradients": size.trained * trained / share,
        "optimizer": size.trained * trained * moments / share,
        "reference": size.trained * trained / share if reference else 0.0,
        "critic": beside,
        "teacher": float(teacher.parameters * weight) if teacher is not None else 0.0,
        "activations": running,
        "logits": logits,
        "unsharded": _unsharded(size, compute) if sharded else 0.0,
        "engine copy": float((size.parameters - (size.trained if size.lora else 0)) * compute) if engine_copy else 0.0,
        "kv cache": float(cache_bytes),
    }


def estimated_as(how: Literal["whole", "sharded", "embedded"]) -> Callable[[F], F]:
    """Decorator for the factory of a backend: how `estimate_memory` counts its memory. "whole": a training backend with
    the whole model on each rank; "sharded": with a sharded model; "embedded": an engine that decodes in the training
    processes, with a cache.
    """

    def mark(factory: F) -> F:
        setattr(factory, _MARK, how)
        return factory

    return mark


def how_estimated(factory: Any) -> str:
    """The mark that `estimated_as` gave to a factory; empty if there is none."""
    return str(getattr(factory, _MARK, ""))


def _activations(size: ModelSize, tokens: int, compute: int, gradient_checkpointing: bool) -> float:
    """Activations for the backward pass. A layer stores about 4 (H + W + K + F) numbers per token. With checkpointing,
    it stores its input (H), and one layer at a time has the rest.
    """
    hidden, width, kv = size.hidden, size.attention_width, size.kv_width
    linear = max(0, size.matmul - size.head) / max(1, size.layers) - 2 * hidden * (width + kv)
    feed_forward = max(0.0, linear) / (3 * hidden)
    layer = 4 * (hidden + width + kv + feed_forward) * compute
    ends = 4 * hidden * compute
    if gradient_checkpointing:
        return tokens * (size.layers * hidden * compute + layer + ends)
    return tokens * (size.layers * layer + ends)


def _unsharded(size: ModelSize, compute: int) -> float:
    """Whole weights of a sharded model: the running layer, the next one, embedding and head (which stay); and the
    gradient of the larger of these, as computed and again in float32 for the sum over ranks.
    """
    outside = size.head * (1 if size.tied else 2)
    largest = max(size.block, outside) if not size.lora else size.trained / max(1, size.layers)
    return float((2 * size.block + outside) * compute + largest * (compute + 4))


def _visited(parameter: Any, config: Any) -> float:
    """The fraction of a weight that a token is multiplied by: 1, but for experts, the fraction that a token uses."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(found) for name in names if (found := getattr(config, name, None))), 0)
    if parameter.ndim == 3 and experts and parameter.shape[0] == experts:
        return min(experts, int(getattr(config, "num_experts_per_tok", None) or experts)) / experts
    return 1.0
