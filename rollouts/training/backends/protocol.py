"""The Protocol of training backends, under the module name of the first notes."""

from __future__ import annotations

from rollouts.models.futures import ImmediateTrainFuture as ImmediateTrainFuture
from rollouts.models.futures import TrainFuture as TrainFuture
from rollouts.training.batches import TrainingBackend as TrainingBackend
