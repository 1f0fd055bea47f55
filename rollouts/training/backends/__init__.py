"""Training backends: engines that hold model and optimizer.

    futures       TrainFuture, and the one thread that does all torch work in order
    transformer   rows of token ids through a causal LM: shared prompts once, the head where it is needed
    torch         the single-process backend
    sums          metrics, read from the device once a batch
    lora          adapters through peft
    checkpoint    folders that appear whole or not at all

Nothing is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.training.backends.futures import ImmediateTrainFuture, TorchThread, TrainFuture
    from rollouts.training.backends.torch import TorchBackend, TorchSettings, create_torch_backend

__all__ = [
    "ImmediateTrainFuture",
    "TorchBackend",
    "TorchSettings",
    "TorchThread",
    "TrainFuture",
    "create_torch_backend",
]

_HOME_OF = {
    "ImmediateTrainFuture": "futures",
    "TorchBackend": "torch",
    "TorchSettings": "torch",
    "TorchThread": "futures",
    "TrainFuture": "futures",
    "create_torch_backend": "torch",
}

__getattr__, __dir__ = lazy_face(__name__, _HOME_OF)
