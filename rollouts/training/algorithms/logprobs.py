"""Logprobs and entropy of chosen tokens, without the logits of all tokens in memory at once.

`head` maps hidden states [t, H] to logits [t, V]. Many tokens are computed in chunks. All chunks but the last are
computed again in the backward pass; this costs four products instead of three, and needs the memory of one chunk. A
head may be any function: LoRA, soft-capped, scaled. A plain `nn.Linear`, tied or not, has a faster path, which uses two
buffers for all chunks, and adds the weight's gradient in place. Logits are converted to fp32 (fp64 stays) and divided
by the temperature. Not here: heads that are split over devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rollouts.models.estimates import CHUNK_ELEMENTS_MAX

# Replaces a logprob of -inf (a masked vocabulary entry), because p = 0 times -inf would be NaN. The value is so low
# that p is 0 too, and its product with a gradient is finite.
_LOGPROB_MIN = -1e30
# About what a CPU's cache holds: 2**20 fp32 numbers are 4 MiB.
_SCRATCH_ELEMENTS_CPU = 1 << 20

Head = Callable[[Tensor], Tensor]


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logprobs [t] of `targets` [t] and the entropy [t] of the prediction, from `logits` [t, V], with gradients."""
    found = _TokenLogprobs.apply(logits, targets[:, None], temperature)  # type: ignore[no-untyped-call]
    return found[0].squeeze(-1), found[1].squeeze(-1)


def logprobs_and_entropy(
    head: Head, hidden: Tensor, targets: Tensor, *, vocabulary_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logprobs [T] of `targets` [T] and entropy [T], from the hidden states [T, H] that predict them."""
    chosen, entropy = _score(head, hidden, targets[:, None], temperature, vocabulary_size)
    return chosen.squeeze(-1), entropy.squeeze(-1)


def logprobs_with_alternatives(
    head: Head, hidden: Tensor, targets: Tensor, alternatives: Tensor, *, vocabulary_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `logprobs_and_entropy`, and the logprobs [T, K] of the ids `alternatives` [T, K], with gradient too."""
    ids = torch.cat([targets[:, None], alternatives], -1)
    chosen, entropy = _score(head, hidden, ids, temperature, vocabulary_size)
    return chosen[:, 0], entropy.squeeze(-1), chosen[:, 1:]


@torch.no_grad()
def topk_logprobs(
    head: Head, features: Tensor, k: int, *, vocabulary_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The K most likely ids [T, K], in descending order, and their logprobs [T, K], without gradient."""
    assert 1 <= k <= vocabulary_size, f"the {k} likeliest of {vocabulary_size} tokens"
    parts = []
    for part in _parts(features.shape[0], _rows_a_chunk(features.shape[0], vocabulary_size)):
        logits = _over(_wide(head(features[part])), temperature)
        values, ids = logits.topk(k, -1)
        parts.append((ids, values - logits.logsumexp(-1, keepdim=True)))
    return torch.cat([ids for ids, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _score(head: Head, hidden: Tensor, ids: Tensor, temperature: float, vocabulary_size: int) -> tuple[Tensor, Tensor]:
    """Logprobs [T, I] of `ids` [T, I] and entropy [T, 1], some rows at a time."""
    count = ids.shape[0]
    size = _rows_a_chunk(count, vocabulary_size)
    graded = torch.is_grad_enabled()
    if count and _is_plain_linear(head, hidden):
        assert isinstance(head, nn.Linear)
        found: tuple[Tensor, Tensor] = _LinearTokenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, ids, temperature, size, graded
        )
        return found

    def one_chunk(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(head(states), wanted, temperature)  # type: ignore[no-untyped-call]
        return found

    pieces: list[tuple[Tensor, Tensor]] = []
    for part in _parts(count, size):
        arguments = (hidden[part], ids[part])
        if graded and part.stop < count:  # the last chunk is kept, because the backward pass begins with it
            pieces.append(checkpoint(one_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            pieces.append(one_chunk(*arguments))
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([chosen for chosen, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def _is_plain_linear(head: object, hidden: Tensor) -> bool:
    """Whether the head is only its weight and bias: no subclass, hook, parametrization or sharded weight."""
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter or head.weight.dtype != hidden.dtype:
        return False
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    return not any(map(bool, hooks)) and "forward" not in vars(head)


def _rows_a_chunk(count: int, vocabulary_size: int) -> int:
    """The number of rows of a chunk, so that chunks have about the same size."""
    most = max(1, CHUNK_ELEMENTS_MAX // max(1, vocabulary_size))
    return max(1, -(-count // max(1, -(-count // most))))


def _parts(count: int, size: int) -> Iterator[slice]:
    """Slices of `size` rows; one empty slice if there are no rows."""
    for start in range(0, max(1, count), size):
        yield slice(start, min(start + size, count))


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _over(values: Tensor, temperature: float) -> Tensor:
    """Divide logits, or the gradient of a result [t, ...]. Dividing the latter is cheaper than dividing the gradient of
    the logits [t, V].
    """
    return values if temperature == 1.0 else values / temperature


def _logit_gradient_(
    logp: Tensor, scratch: Tensor, ids: Tensor, entropy: Tensor, grads: Sequence[Tensor | None], rows: slice
) -> None:
    """The gradient [t, V] of the undivided logits, written over `logp` [t, V].

    `scratch` has at least t rows. The other tensors are for all tokens, and `rows` selects the t.

    d logp_i / d logit_j = [i = j] - p_j,  d H / d logit_j = -p_j (logp_j + H).
    """
    grad_chosen, grad_entropy = (None if grad is None else grad[rows] for grad in grads)
    total = 0.0 if grad_chosen is None else grad_chosen.sum(-1, keepdim=True)
    if grad_entropy is None:
        logp.exp_().mul_(-total)
    else:
        probabilities = torch.exp(logp, out=scratch[: len(logp)])
        logp.add_(entropy[rows]).mul_(-grad_entropy).sub_(total).mul_(probabilities)
    if grad_chosen is not None:
        logp.scatter_add_(-1, ids[rows], grad_chosen)


class _TokenLogprobs(torch.autograd.Function):
    """logits [t, V], ids [t, I] -> (logprobs [t, I], entropy [t, 1]). Stores one copy of the log-probabilities only."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(_over(_wide(logits), temperature), dim=-1)
        logp.clamp_(min=_LOGPROB_MIN)
        entropy = -torch.linalg.vecdot(logp.exp(), logp)[:, None]
        ctx.save_for_backward(logp, ids, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return logp.gather(-1, ids), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        logp, ids, entropy = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return None, None, None
        divided = [None if grad is None else _over(grad, ctx.temperature) for grad in grads]
        gradient = logp.clone()  # the graph may be kept for another backward pass
        scratch = _scratch(gradient, len(gradient))
        for rows in _parts(len(gradient), max(1, len(scratch))):
            _logit_gradient_(gradient[rows], scratch, ids, entropy, divided, rows)
        return gradient.to(ctx.dtype), None, None


class _LinearTokenLogprobs(torch.autograd.Function):
    """hidden [T, H], weight [V, H], bias [V], ids [T, I] -> (logprobs [T, I], entropy [T, 1]), `size` rows at a time.

    Stores two numbers per token, and the log-probabilities of the last chunk, because the backward pass begins there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float,
        size: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        buffer = _chunk_buffer(hidden, weight, size)
        scratch = _scratch(buffer, size)
        chosen = buffer.new_empty(ids.shape)
        entropy, norm = chosen.new_empty(len(ids), 1), chosen.new_empty(len(ids), 1)
        logp = buffer
        for part in _parts(len(ids), size):
            logp = _logits_into(buffer, part, hidden, weight, bias, temperature)
            for rows in _parts(len(logp), len(scratch)):
                block, place = logp[rows], slice(part.start + rows.start, part.start + rows.stop)
                top = block.amax(-1, keepdim=True)
                exponentials = torch.exp(block.sub_(top), out=scratch[: len(block)])
                total = exponentials.sum(-1, keepdim=True)
                log_total = total.log()
                chosen[place] = block.gather(-1, ids[place]).sub_(log_total)
                entropy[place] = log_total - torch.linalg.vecdot(exponentials, block)[:, None] / total
                norm[place] = log_total + top
                if keep and part.stop == len(ids):
                    block.sub_(log_total)
        ctx.save_for_backward(hidden, weight, bias, ids, entropy, norm)
        ctx.temperature, ctx.size = temperature, size
        ctx.kept = logp if keep else None
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None and grads[1] is None:
            return (None,) * 7
        hidden, weight, bias, ids, entropy, norm = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None  # it is overwritten; another backward pass computes it again
        divided = [None if grad is None else _over(grad, ctx.temperature) for grad in grads]
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_bias = torch.zeros_like(bias) if for_bias and bias is not None else None
        grad_weight: Tensor | None = None
        buffer = scratch = None
        for part in reversed(list(_parts(len(ids), ctx.size))):
            if kept is not None:
                logp, kept = kept, None
                buffer = logp if len(logp) == ctx.size else None
            else:
                buffer = _chunk_buffer(hidden, weight, ctx.size) if buffer is None else buffer
                logp = _logits_into(buffer, part, hidden, weight, bias, ctx.temperature).sub_(norm[part])
            scratch = _scratch(logp, ctx.size) if scratch is None else scratch
            for rows in _parts(len(logp), len(scratch)):
                place = slice(part.start + rows.start, part.start + rows.stop)
                _logit_gradient_(logp[rows], scratch, ids, entropy, divided, place)
            gradient = logp.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[part])
            if for_weight:
                product = gradient.T, hidden[part]
                if grad_weight is None:
                    grad_weight = torch.mm(*product).to(logp.dtype)
                elif grad_weight.dtype == gradient.dtype:
                    grad_weight.addmm_(*product)
                else:  # half precision: the chunks are added up in float32
                    grad_weight += torch.mm(*product)
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
            del logp, gradient
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _chunk_buffer(hidden: Tensor, weight: Tensor, size: int) -> Tensor:
    """A buffer for the logits [size, V] of one chunk."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.empty(size, weight.shape[0], dtype=dtype, device=hidden.device)


def _scratch(like: Tensor, size: int) -> Tensor:
    """A buffer for some rows of a chunk: few on a CPU, so that they stay in its cache; else all `size`."""
    most = max(1, _SCRATCH_ELEMENTS_CPU // like.shape[-1]) if like.device.type == "cpu" else size
    return like.new_empty(min(most, size), like.shape[-1])


def _logits_into(
    buffer: Tensor, part: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Tensor:
    """The divided logits of some rows, in the first rows of `buffer`."""
    logits = buffer[: part.stop - part.start]
    if weight.dtype == logits.dtype:
        torch.mm(hidden[part], weight.T, out=logits)
        if bias is not None:
            logits.add_(bias)
    else:
        logits.copy_(nn.functional.linear(hidden[part], weight, bias))
    if temperature != 1.0:
        logits.div_(temperature)
    if bias is not None:
        logits.clamp_(min=_LOGPROB_MIN)
    return logits
