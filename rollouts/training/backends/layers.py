"""The repeated layers of a model: find them, compute their activations again in the backward pass, compile them.

Both change the `forward` of a layer, in place, before the model is sharded: first the checkpoint, then the compilation
around it, then the shards of FSDP2. An engine in this process runs the same layers without a forest, and gets the
plain `forward`. If a compilation fails, all layers run as they are, and a note says why.
"""

from __future__ import annotations

import functools
import os
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# A layer is compiled for few shapes: node budgets, ways of attention, windows, with gradient and without.
_VARIANTS_MAX = 64


class Compilations:
    """The compiled layers of a trainer.

    Attributes:
        is_on: layers are compiled from now on
        failure: why they run as they are; empty: no compilation has failed
    """

    def __init__(self, *, memory_budget: float = 1.0) -> None:
        self.is_on, self.failure = False, ""
        self._memory_budget = memory_budget
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._seen = _graph_count()

    def new(self) -> int:
        """The number of compilations since the last call."""
        before, self._seen = self._seen, _graph_count()
        return self._seen - before

    def of(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled `forward` of a class of layers, for passes over a forest."""
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        compiled = self._compiled.setdefault(run, torch.compile(run, dynamic=False))

        @functools.wraps(run)
        def forward(layer: nn.Module, *args: Any, **settings: Any) -> Any:
            if not self.is_on or settings.get("forest") is None:
                return run(layer, *args, **settings)
            configure_compiler(memory_budget=self._memory_budget, fails_at_limit=True)
            try:
                return compiled(layer, *args, **settings)
            except FailOnRecompileLimitHit:
                self.is_on, self.failure = False, f"a layer would be compiled for more than {_VARIANTS_MAX} shapes"
            except TorchDynamoException as error:
                self.is_on, self.failure = False, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            configure_compiler(fails_at_limit=False)
            return run(layer, *args, **settings)

        return forward


def configure_compiler(*, memory_budget: float = 1.0, fails_at_limit: bool = False) -> None:
    """Set torch's settings for this thread; newer versions have them for each thread."""
    from torch import _dynamo as dynamo
    from torch._functorch import config as functorch

    if getattr(_configured, "as_", None) == (memory_budget, fails_at_limit):
        return
    # One cache for this user, so that the next run compiles nothing.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "rollouts" / "inductor"))
    functorch.activation_memory_budget = memory_budget
    dynamo.config.recompile_limit = _VARIANTS_MAX
    dynamo.config.fail_on_recompile_limit_hit = fails_at_limit
    _configured.as_ = (memory_budget, fails_at_limit)


_configured = threading.local()


def _graph_count() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def repeated_layers(causal: Any) -> list[nn.Module]:
    """The transformer blocks: modules of the classes that transformers must not split, else the longest list. Empty if
    the model has none.
    """
    names = set(getattr(causal, "_no_split_modules", None) or ())
    blocks = [module for module in causal.modules() if type(module).__name__ in names]
    lists = [list(module) for module in causal.modules() if isinstance(module, nn.ModuleList)]
    return blocks or max(lists, key=len, default=[])


def wrap_layers(causal: Any, *, checkpoints: bool, compilations: Compilations | None = None) -> None:
    """Let the repeated layers of a model compute their activations again in the backward pass (Chen et al. 2016), and
    compile them.
    """
    for layer in repeated_layers(causal):
        own = layer.forward
        run = getattr(own, "__func__", own) if getattr(own, "__self__", None) is layer else _ignoring_layer(own)
        run = _checkpointed(run) if checkpoints else run
        run = compilations.of(run) if compilations is not None else run
        # A method, because a deep copy of the model must run its own layers.
        layer.forward = types.MethodType(run, layer)


def _ignoring_layer(run: Callable[..., Any]) -> Callable[..., Any]:
    """Somebody else's wrapper of a layer, which has the layer already."""
    return lambda _, *args, **settings: run(*args, **settings)


@functools.cache
def _checkpointed(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def forward(layer: nn.Module, *args: Any, **settings: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(layer, *args, **settings)
        return checkpoint(run, layer, *args, use_reentrant=False, preserve_rng_state=False, **settings)

    return forward
