"""The data types of training, under one module name.

Their homes are `rollouts.types`, `rollouts.training.batches` and the rooms of the loops. Names are imported on first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.config.sections import TrainingConfig as TrainingConfig
    from rollouts.models.futures import ImmediateTrainFuture as ImmediateTrainFuture
    from rollouts.models.futures import TrainFuture as TrainFuture
    from rollouts.training.batches import AuxiliaryModels as AuxiliaryModels
    from rollouts.training.batches import ForwardOutput as ForwardOutput
    from rollouts.training.batches import RankServer as RankServer
    from rollouts.training.batches import Row as Row
    from rollouts.training.batches import StepResult as StepResult
    from rollouts.training.batches import TrainBatch as TrainBatch
    from rollouts.training.batches import TrainingBackend as TrainingBackend
    from rollouts.training.rollout_gen.steps import RolloutBatch as RolloutBatch
    from rollouts.training.rollout_gen.steps import RolloutConfig as RolloutConfig
    from rollouts.training.samples import RLSample as RLSample
    from rollouts.training.simple.configs import RLTrainingConfig as RLTrainingConfig
    from rollouts.training.simple.configs import SFTTrainingConfig as SFTTrainingConfig
    from rollouts.training.weights.engines import InferenceEngine as InferenceEngine
    from rollouts.types import Sample as Sample
    from rollouts.types import Status as Status

__getattr__, __dir__ = lazy_face(__name__)
