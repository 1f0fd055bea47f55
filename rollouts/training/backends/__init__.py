"""Training backends: engines that hold model and optimizer.

    torch         the backend: futures around an executor, which carries out commands; Executor is one process
    fsdp          the sharded backend: starts the ranks
    ranks         their executor, `heartbeats` to find a failed rank, `rendezvous` by which they meet
    trainer       one rank's model, optimizer and work
    forward       rows through the policy, the critic and the teacher
    auxiliary     the models beside the policy: critic, teacher, reference
    transformer   rows of token ids through a causal LM: shared prompts once, the head where it is needed
    sharding      FSDP2: each rank's shards of the weights, and its rows of a batch
    metric_sums   metrics, read from the device once a batch, joined over ranks
    optimizer     settings, optimizers and learning rates
    profiling     traces, and peak memory

Nothing is imported until it is used. Checkpoints are in `rollouts.training.weights`; the backend for your own torch
objects is in the package `rollouts_notes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts_notes.pytorch_factory import PyTorchTrainingBackend as PyTorchTrainingBackend
    from rollouts_notes.pytorch_factory import create_pytorch_backend as create_pytorch_backend
    from rollouts_notes.pytorch_factory import is_sharded as is_sharded

    from rollouts.models.futures import ImmediateTrainFuture as ImmediateTrainFuture
    from rollouts.models.futures import TrainFuture as TrainFuture
    from rollouts.training.backends.fsdp import FSDPTrainingBackend as FSDPTrainingBackend
    from rollouts.training.batches import TrainingBackend as TrainingBackend

__getattr__, __dir__ = lazy_face(__name__)
