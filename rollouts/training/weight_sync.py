"""Names of `rollouts.training.weights.sync` and `engines`, under an older module name."""

from rollouts.training.weights.engines import InferenceEngine, SGLangEngine, VLLMEngine, sync_weights_to_engines
from rollouts.training.weights.sync import WeightSyncManager

__all__ = ["InferenceEngine", "SGLangEngine", "VLLMEngine", "WeightSyncManager", "sync_weights_to_engines"]
