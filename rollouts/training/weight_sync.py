"""Names of `rollouts.training.weights.sync`, under an older module name."""

from rollouts.training.weights.sync import (
    InferenceEngine,
    SGLangEngine,
    VLLMEngine,
    WeightSyncManager,
    sync_weights_to_engines,
)

__all__ = ["InferenceEngine", "SGLangEngine", "VLLMEngine", "WeightSyncManager", "sync_weights_to_engines"]
