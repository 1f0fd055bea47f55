"""The names of weight sync under one module; they live in `rollouts.training.weights.sync`."""

from rollouts.training.weights.sync import (
    InferenceEngine,
    SGLangEngine,
    VLLMEngine,
    WeightSyncManager,
    sync_weights_to_engines,
)

__all__ = ["InferenceEngine", "SGLangEngine", "VLLMEngine", "WeightSyncManager", "sync_weights_to_engines"]
