"""The Protocol of training backends, under the module name of the first notes."""

from __future__ import annotations

from rollouts.training.backends.futures import ImmediateTrainFuture as ImmediateTrainFuture
from rollouts.training.backends.futures import TrainFuture as TrainFuture
from rollouts.training.batches import TrainingBackend as TrainingBackend
