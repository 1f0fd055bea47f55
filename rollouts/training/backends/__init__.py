"""Training backends: engines that hold model and optimizer.

    torch         the backend: futures around an executor, which carries out commands; Executor is one process
    trainer       one rank's model, optimizer and work
    forward       rows through the policy, the critic and the teacher
    auxiliary     the models beside the policy: critic, teacher, reference
    transformer   a forest of rows through a causal LM; the head where it is needed
    attention     attention over a forest of rows, on a CPU and on a GPU
    layers        repeated layers: computed again in the backward pass, compiled
    sharding      what trainer and executor know of ranks: whole tensors, and each rank's rows of a batch
    metric_sums   metrics, read from the device once a batch, joined over ranks
    optimizer     settings, learning rates, optimizers, float32 masters of half-precision weights
    profiling     traces, and peak memory

Nothing is imported until it is used. Checkpoints are in `rollouts.training.weights`. The sharded backend is the package
`rollouts_fsdp`, also by earlier names here such as `fsdp` and `ranks`; the backend for your own torch objects is in the
package `rollouts_notes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts_fsdp.backend import FSDPTrainingBackend as FSDPTrainingBackend
    from rollouts_notes.pytorch_factory import PyTorchTrainingBackend as PyTorchTrainingBackend
    from rollouts_notes.pytorch_factory import create_pytorch_backend as create_pytorch_backend
    from rollouts_notes.pytorch_factory import is_sharded as is_sharded

    from rollouts.models.futures import ImmediateTrainFuture as ImmediateTrainFuture
    from rollouts.models.futures import TrainFuture as TrainFuture
    from rollouts.training.batches import TrainingBackend as TrainingBackend

__getattr__, __dir__ = lazy_face(__name__)
