"""Training backends: engines that hold model and optimizer.

    futures       TrainFuture, and the one thread that does all torch work in order
    torch         the backend: futures around a crew; a single process is a crew of one
    crew          commands, and who carries them out
    trainer       one rank's model, optimizer and work
    passes        rows through the policy, the critic and the teacher
    transformer   rows of token ids through a causal LM: shared prompts once, the head where it is needed
    fsdp          the sharded backend; `sharding`, `shares` of a batch, `ranks`, `heartbeats`, `messages` are its rooms
    sums          metrics, read from the device once a batch, joined over ranks
    optimizer     optimizers and learning rates
    reference, companions    the models beside the policy
    lora          adapters through peft
    checkpoint    what is in a checkpoint's folder; `checkpoint_writing` makes it, whole; `checkpoint_files` finds it
    profiling     traces, and peak memory
    pytorch_factory    torch objects of one's own behind futures

Nothing is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.training.backends.fsdp import create_fsdp_backend
    from rollouts.training.backends.futures import ImmediateTrainFuture, TorchThread, TrainFuture
    from rollouts.training.backends.pytorch_factory import (
        PyTorchTrainingBackend,
        create_adamw_optimizer,
        create_cross_entropy_loss,
        create_pytorch_backend,
        create_warmup_cosine_scheduler,
    )
    from rollouts.training.backends.torch import TorchBackend, TorchSettings, create_torch_backend

__all__ = [
    "ImmediateTrainFuture",
    "PyTorchTrainingBackend",
    "TorchBackend",
    "TorchSettings",
    "TorchThread",
    "TrainFuture",
    "create_adamw_optimizer",
    "create_cross_entropy_loss",
    "create_fsdp_backend",
    "create_pytorch_backend",
    "create_torch_backend",
    "create_warmup_cosine_scheduler",
]

_HOME_OF = {
    "ImmediateTrainFuture": "futures",
    "PyTorchTrainingBackend": "pytorch_factory",
    "TorchBackend": "torch",
    "TorchSettings": "torch",
    "TorchThread": "futures",
    "TrainFuture": "futures",
    "create_adamw_optimizer": "pytorch_factory",
    "create_cross_entropy_loss": "pytorch_factory",
    "create_fsdp_backend": "fsdp",
    "create_pytorch_backend": "pytorch_factory",
    "create_torch_backend": "torch",
    "create_warmup_cosine_scheduler": "pytorch_factory",
}

__getattr__, __dir__ = lazy_face(__name__, _HOME_OF)
