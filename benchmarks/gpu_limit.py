"""A trainer of Qwen3 by hand, as a limit for `benchmarks/gpu.py`: what one device can do without a library around it.

The rows of a microbatch are end to end, without padding between them, and all microbatches have one length, so layers
are compiled once. Attention is torch's varlen attention, or cuDNN's if a microbatch has a single row. The head runs in
chunks, with a hand-written backward pass: it holds the logits of one chunk. Weights are bfloat16. Gradients are summed
over microbatches in float32, and a fused AdamW steps float32 masters, which overwrite the weights.

Left out, so this is a limit and not a trainer: metrics, other models and losses, shared prompts, several devices,
checkpoints. On a CPU everything is float32, and attention has a dense mask.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rollouts.types import Sample

__all__ = ["Limit", "dense", "varlen"]

CHUNK = 4096
CLIP = 0.2
MULTIPLE = 128  # of the length of a microbatch


class Microbatch(NamedTuple):
    """Rows end to end: T tokens, of which P predict a trained one.

    `cu_seqlens` [rows + 1] has the first token of each row, and the end of the last one. A last row of
    zeros fills the microbatch.
    """

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    cu_seqlens: Tensor
    longest: int
    predicting: Tensor  # [P]
    targets: Tensor  # [P]
    advantages: Tensor | None  # [P]; None: supervised
    old: Tensor | None  # [P]


def make_microbatches(
    samples: Sequence[Sample], advantages: Sequence[float] | None, tokens: int, device: str
) -> list[Microbatch]:
    """Microbatches of about `tokens` tokens, all of one length. The longest row goes first, into the emptiest one."""
    longest = max(len(sample.tokens) for sample in samples)
    total = sum(len(sample.tokens) for sample in samples)
    count = min(len(samples), math.ceil(total / max(tokens, longest)))
    rows: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for number in sorted(range(len(samples)), key=lambda number: -len(samples[number].tokens)):
        emptiest = filled.index(min(filled))
        rows[emptiest].append(number)
        filled[emptiest] += len(samples[number].tokens)
    width = math.ceil(max(filled) / MULTIPLE) * MULTIPLE
    most = max(map(len, rows)) + 1
    return [_make_microbatch(samples, advantages, numbers, width, most, longest, device) for numbers in rows]


def _make_microbatch(
    samples: Sequence[Sample],
    advantages: Sequence[float] | None,
    numbers: list[int],
    width: int,
    rows_max: int,
    longest: int,
    device: str,
) -> Microbatch:
    ids: list[int] = []
    positions: list[int] = []
    cu_seqlens, predicting, targets = [0], [], []
    scales: list[float] = []
    old: list[float] = []
    for number in numbers:
        sample, start = samples[number], len(ids)
        trained = [position for position in range(1, len(sample.tokens)) if sample.loss_mask[position]]
        predicting += [start + position - 1 for position in trained]
        targets += [sample.tokens[position] for position in trained]
        if advantages is not None:
            scales += [advantages[sample.rollout_index or 0]] * len(trained)
            assert sample.rollout_log_probs is not None
            old += [sample.rollout_log_probs[position] for position in trained]
        ids += sample.tokens
        positions += range(len(sample.tokens))
        cu_seqlens.append(len(ids))
    rest = width - len(ids)
    alone = not rest and len(numbers) == 1
    ids += [0] * rest
    positions += range(rest)
    cu_seqlens += [width] * (rows_max + 1 - len(cu_seqlens))  # rows of length 0: all microbatches have one shape
    tensor = functools.partial(torch.tensor, device=device)
    policy = advantages is not None
    return Microbatch(
        tensor(ids),
        tensor(positions),
        tensor(cu_seqlens, dtype=torch.int32),
        width if alone else min(max(longest, rest), width - 1),  # the width says that there is a single row
        tensor(predicting),
        tensor(targets),
        tensor(scales) if policy else None,
        tensor(old) if policy else None,
    )


# --- attention --------------------------------------------------------------------------------------------------------


@functools.cache
def _varlen() -> tuple[Callable[..., Any], dict[str, Any]]:
    """torch's varlen attention, and the settings with which it is causal. torch 2.12 and newer ask for `enable_gqa`."""
    from torch.nn.attention.varlen import varlen_attn

    settings: dict[str, Any] = {"window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        settings["enable_gqa"] = True
    return varlen_attn, settings


def varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Causal attention within the rows between `cu_seqlens`, on CUDA: [T, heads, size]. Query heads may share keys."""
    attention, settings = _varlen()
    return attention(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **settings)  # type: ignore[no-any-return]


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """torch's attention over [T, heads, size], with a mask [T, T]; causal without one. No fast kernel of torch takes
    both a mask and shared keys, so with a mask the keys are repeated, as in transformers.
    """
    if mask is not None:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return output[0].transpose(0, 1)


def attend(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Causal attention within rows: dense for a single row, varlen for several ones, with a mask on a CPU."""
    width = query.shape[0]
    if longest == width:
        return dense(query, key, value, None)
    if query.is_cuda:
        return varlen(query, key, value, cu_seqlens, longest)
    positions = torch.arange(width)
    row = torch.bucketize(positions, cu_seqlens, right=True)
    return dense(query, key, value, (row[:, None] == row) & (positions[:, None] >= positions))


@contextlib.contextmanager
def fast_attention() -> Iterator[None]:
    """Dense attention prefers cuDNN, then flash attention, which is faster in this order on Hopper."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


# --- the model --------------------------------------------------------------------------------------------------------


class Projection(nn.Module):
    """A linear layer with an adapter of this rank, whose scale is 2; with rank 0, all of its weights are trained."""

    def __init__(self, linear: Any, rank: int) -> None:
        super().__init__()
        weight = linear.weight
        self.weight = nn.Parameter(weight.detach(), requires_grad=not rank)
        self.rank = rank
        if rank:
            self.down = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
            nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
            self.up = nn.Parameter(weight.new_zeros(weight.shape[0], rank))

    def forward(self, inputs: Tensor) -> Tensor:
        output = functional.linear(inputs, self.weight)
        if not self.rank:
            return output
        return output + 2.0 * functional.linear(functional.linear(inputs, self.down), self.up)


class Norm(nn.Module):
    """Qwen3's norm, computed in float32."""

    def __init__(self, norm: Any, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach(), requires_grad=trained)
        self.eps = norm.variance_epsilon

    def forward(self, inputs: Tensor) -> Tensor:
        wide = inputs.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(inputs.dtype)


def rotate(inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of [T, heads, size]."""
    first, second = inputs.chunk(2, dim=-1)
    return inputs * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class Layer(nn.Module):
    """A layer of Qwen3 over [T, hidden], with the weights of a layer of transformers."""

    def __init__(self, layer: Any, rank: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.size = attention.head_dim
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        self.query, self.key, self.value, self.out = (Projection(getattr(attention, name), rank) for name in names)
        self.gate, self.rise, self.fall = (
            Projection(linear, rank) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        self.query_norm, self.key_norm = Norm(attention.q_norm, not rank), Norm(attention.k_norm, not rank)
        self.before = Norm(layer.input_layernorm, not rank)
        self.between = Norm(layer.post_attention_layernorm, not rank)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        inputs = self.before(hidden)
        heads = (len(inputs), -1, self.size)
        query = rotate(self.query_norm(self.query(inputs).view(heads)), cos, sin)
        key = rotate(self.key_norm(self.key(inputs).view(heads)), cos, sin)
        mixed = attend(query, key, self.value(inputs).view(heads), cu_seqlens, longest)
        hidden = hidden + self.out(mixed.reshape(len(inputs), -1))
        inputs = self.between(hidden)
        return hidden + self.fall(functional.silu(self.gate(inputs)) * self.rise(inputs))  # type: ignore[no-any-return]


# --- the head ---------------------------------------------------------------------------------------------------------


def chunk_gradient(
    logits: Tensor, targets: Tensor, advantages: Tensor | None, old: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The sum of losses of a chunk [P, vocabulary], and its gradient: cross-entropy, or PPO's clipped ratio."""
    wide = logits.float()
    total = torch.logsumexp(wide, -1, keepdim=True)
    logprobs = (wide.gather(-1, targets[:, None]) - total)[:, 0]
    if advantages is None or old is None:
        losses, slopes = -logprobs, -torch.ones_like(logprobs)
    else:
        ratios = torch.exp(logprobs - old)
        plain, clipped = ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages
        losses, slopes = -torch.minimum(plain, clipped), torch.where(plain <= clipped, -plain, 0.0)
    hit = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return losses.sum(), ((hit.float() - torch.exp(wide - total)) * slopes[:, None]).to(logits.dtype)


class Head(torch.autograd.Function):
    """The sum of losses. The gradients are computed in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, work: Microbatch, gradient: Callable[..., Any]) -> Tensor:
        """`gradient` is `chunk_gradient`, compiled or not."""
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        loss = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            fields = (None if field is None else field[part] for field in work[-3:])
            part_loss, of_logits = gradient(hidden[part] @ weight.T, *fields)
            loss += part_loss
            of_hidden[part] = of_logits @ weight
            if of_weight is not None:
                of_weight += of_logits.T @ hidden[part]
        ctx.save_for_backward(of_hidden, None if of_weight is None else of_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        """The caller calls backward on the sum itself, so the outer gradient is 1."""
        return (*ctx.saved_tensors, None, None)


# --- the trainer ------------------------------------------------------------------------------------------------------


class Limit:
    """The hand-written side: a model of transformers' weights, and microbatches over the same samples at each step."""

    def __init__(
        self,
        causal: Any,
        samples: Sequence[Sample],
        advantages: Sequence[float] | None,
        *,
        rank: int,
        tokens: int,
        lr: float,
        checkpoints: bool,
        compiled: bool,
    ) -> None:
        device = str(causal.device)
        self.microbatches = make_microbatches(samples, advantages, tokens, device)
        self.trained = sum(len(work.targets) for work in self.microbatches)
        self.layers = nn.ModuleList(Layer(layer, rank) for layer in causal.model.layers)
        self.norm = Norm(causal.model.norm, not rank)
        self.embedding = nn.Parameter(causal.model.embed_tokens.weight.detach(), requires_grad=not rank)
        self.rotary = causal.model.rotary_emb
        self.checkpoints = checkpoints
        self.gradient: Callable[..., Any] = chunk_gradient
        if compiled:
            self.gradient = torch.compile(chunk_gradient)
            for layer in self.layers:
                layer.compile(dynamic=False)  # all microbatches have one length
        weights = (*self.layers.parameters(), *self.norm.parameters(), self.embedding)
        self.weights: list[Tensor] = [weight for weight in weights if weight.requires_grad]
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def _loss(self, work: Microbatch) -> Tensor:
        hidden = functional.embedding(work.ids, self.embedding)
        cos, sin = (table[0] for table in self.rotary(hidden, work.positions[None]))
        for layer in self.layers:
            inputs = (hidden, cos, sin, work.cu_seqlens, work.longest)
            hidden = checkpoint(layer, *inputs, use_reentrant=False) if self.checkpoints else layer(*inputs)
        return Head.apply(self.norm(hidden.index_select(0, work.predicting)), self.embedding, work, self.gradient)  # type: ignore[no-any-return,no-untyped-call]

    def step(self) -> dict[str, float]:
        """Train on all microbatches. Returns the mean loss and the norm of the gradient."""
        sums: list[Tensor] = []
        losses = []
        with fast_attention():
            for work in self.microbatches:
                loss = self._loss(work)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
                gradients = [weight.grad for weight in self.weights]
                sums = _added(sums, gradients)
                for weight in self.weights:
                    weight.grad = None
        torch._foreach_div_(sums, float(self.trained))
        norm = nn.utils.get_total_norm(sums)
        torch._foreach_mul_(sums, torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        for master, gradient in zip(self.masters, sums, strict=True):
            master.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        return {"loss": float(torch.stack(losses).sum()) / self.trained, "norm": float(norm)}

    def close(self) -> None:
        """Nothing to end: the memory is freed with the object."""


def _added(sums: list[Tensor], gradients: list[Any]) -> list[Tensor]:
    """The sums in float32, with these gradients."""
    if not sums:
        return [gradient.float() for gradient in gradients]
    torch._foreach_add_(sums, gradients)
    return sums
