"""Logprobs and entropy of chosen tokens, without ever holding tokens x vocabulary in the backward pass.

`head` maps hidden states [t, H] to logits [t, V]. Few tokens go through at once; many go in chunks that are computed
again in the backward (four products instead of three, and the memory of one chunk). Works with any head that is a
function: tied, LoRA, soft-capped. Logits are taken to fp32 (fp64 stays) and divided by the temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["CHUNK_ELEMENTS_MAX", "logprobs_and_entropy", "token_logprobs"]

# Logits of one chunk: 2**24 fp32 numbers are 64 MiB. Below this nothing is computed twice.
CHUNK_ELEMENTS_MAX = 1 << 24


class _TokenLogprobs(torch.autograd.Function):
    """logits [t, V], targets [t] -> (logprobs [t], entropy [t]); keeps log-probabilities only, once."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(logits, dim=-1)
        # A vocabulary entry masked with -inf has p = 0; 0 * -inf would be NaN.
        logp.clamp_(min=torch.finfo(logp.dtype).min)
        probabilities = logp.exp()
        entropy = -torch.linalg.vecdot(probabilities, logp)
        ctx.save_for_backward(logp, targets, entropy)
        ctx.set_materialize_grads(False)
        return logp.gather(-1, targets[:, None]).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        grad_logprobs, grad_entropy = grads
        logp, targets, entropy = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return None, None
        gradient = logp.exp()
        if grad_entropy is None:
            assert grad_logprobs is not None
            gradient.mul_(-grad_logprobs[:, None])
        else:
            slope = grad_entropy[:, None] * (logp + entropy[:, None])
            if grad_logprobs is not None:
                slope += grad_logprobs[:, None]
            gradient.mul_(slope.neg_())
        if grad_logprobs is not None:
            gradient.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
        return gradient, None


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Logprobs [t] of `targets` [t] and the entropy [t] of the prediction, from `logits` [t, V].

    `temperature` is one number, or one a token [t]. Both results carry gradients.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if isinstance(temperature, Tensor):
        logits = logits / temperature[:, None]
    elif temperature != 1.0:
        logits = logits / temperature
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(logits, targets)  # type: ignore[no-untyped-call]
    return result


def logprobs_and_entropy(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    vocabulary_size: int,
    temperature: float | Tensor = 1.0,
    chunk_elements_max: int = CHUNK_ELEMENTS_MAX,
) -> tuple[Tensor, Tensor]:
    """Logprobs [T] of `targets` [T] and entropy [T], from the hidden states [T, H] that predict them."""
    count = targets.shape[0]
    size = max(1, chunk_elements_max // max(1, vocabulary_size))
    if count <= size:
        return token_logprobs(head(hidden), targets, temperature)

    def one_chunk(states: Tensor, wanted: Tensor, divisor: float | Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(head(states), wanted, divisor)

    parts = []
    for start in range(0, count, size):
        part = slice(start, start + size)
        divisor = temperature[part] if isinstance(temperature, Tensor) else temperature
        arguments = (hidden[part], targets[part], divisor)
        if torch.is_grad_enabled():
            parts.append(checkpoint(one_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(one_chunk(*arguments))
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])
