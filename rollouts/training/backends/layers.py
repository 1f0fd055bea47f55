"""The repeated layers of a model: find them, compute their activations again in the backward pass, compile them.

Both are done to the `forward` of a layer, in place, before the model is sharded: first the checkpoint, then the
compilation around it, then the shards of `sharding`. An engine in this process runs the same layers without gradient
and without a forest; it gets the plain `forward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def repeated_layers(causal: Any) -> list[nn.Module]:
    """The transformer blocks: modules of the classes that transformers must not split, else the longest list. Empty if
    the model has none.
    """
    names = set(getattr(causal, "_no_split_modules", None) or ())
    blocks = [module for module in causal.modules() if type(module).__name__ in names]
    lists = [list(module) for module in causal.modules() if isinstance(module, nn.ModuleList)]
    return blocks or max(lists, key=len, default=[])


def wrap_layers(causal: Any, *, checkpoints: bool) -> None:
    """Let the repeated layers of a model compute their activations again in the backward pass (Chen et al. 2016)."""
    for layer in repeated_layers(causal) if checkpoints else ():
        layer.forward = _checkpointed(layer.forward)


def _checkpointed(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def forward(*args: Any, **settings: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args, **settings)
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **settings)

    return forward
