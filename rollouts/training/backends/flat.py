"""Rows without an advantage: where a loss has no gradient at them, they are run forward only.

A group whose rollouts are all rewarded alike has advantages of 0, and most policy losses are then 0 with all their
gradient. Whether it is so is not believed but found, at what the models gave: the terms are called as ever, on logprobs
that are the ends of the graph. So metrics are the same, and a term that does not depend on advantages keeps its rows
trained in full. Left out: ranks that share a model (they meet in every backward), and which rows run together
(`batching`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rollouts.training.algorithms.algorithm import Algorithm, active_terms
from rollouts.training.algorithms.needs import is_reward_placed, requests
from rollouts.training.backends.passes import Scored
from rollouts.training.types import Row

__all__ = ["cut_off", "gradient_size", "is_flat", "may_be_flat"]


def may_be_flat(algorithm: Algorithm) -> bool:
    """Whether it is worth trying: every term of the loss names the advantages, and no KL is a term of it."""
    kl = algorithm.kl
    if kl is not None and not is_reward_placed(kl.function):
        return False
    return all("advantages" in requests(term.function) for term in active_terms(algorithm))


def is_flat(rows: Sequence[Row]) -> bool:
    """Whether no token of these rows has an advantage; of no rows that is False."""
    return bool(rows) and not any(any(row.advantages) for row in rows)


def cut_off(scored: Scored, values: Tensor | None) -> tuple[Scored, Tensor | None, list[Tensor]]:
    """The same numbers as ends of a graph of their own, and a list of these ends."""
    ends: list[Tensor] = []

    def end(tensor: Tensor) -> Tensor:
        ends.append(tensor.detach().requires_grad_())
        return ends[-1].clone()  # which a loss may change in place

    extra = {name: end(tensor) if tensor.is_floating_point() else tensor for name, tensor in scored.extra.items()}
    cut = scored._replace(logprobs=end(scored.logprobs), entropy=end(scored.entropy), extra=extra)
    return cut, None if values is None else end(values), ends


def gradient_size(objective: Tensor, ends: Sequence[Tensor]) -> float:
    """The largest gradient at the ends; NaN where one is, or where the objective depends on none of them."""
    if not objective.requires_grad:
        return math.nan
    gradients = torch.autograd.grad(objective, ends, allow_unused=True)
    sizes = [each.abs().amax().double() for each in gradients if each is not None]
    return float(torch.stack(sizes).amax()) if sizes else math.nan
