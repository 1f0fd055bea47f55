"""The module paths of `rollouts.training` that are faces: each name is the same object as at its home."""

from __future__ import annotations

import rollouts
from rollouts.training import batches, types


def test_types_has_the_data_types_of_every_room():
    from rollouts.training.types import InferenceEngine, RLTrainingConfig, Row, Sample, Status, TrainBatch, TrainFuture

    assert (Row, TrainBatch, types.TrainingBackend) == (batches.Row, batches.TrainBatch, batches.TrainingBackend)
    assert Status is rollouts.Status and issubclass(Sample, rollouts.Sample)
    assert (RLTrainingConfig, TrainFuture) == (rollouts.training.RLTrainingConfig, rollouts.training.TrainFuture)
    assert InferenceEngine is rollouts.training.InferenceEngine
