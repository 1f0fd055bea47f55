"""What a vLLM server needs beside itself to load weights on a CPU: a worker extension, in a folder of its own.

    PYTHONPATH=<this folder> vllm serve MODEL --worker-extension-cls rollouts_vllm_worker.RolloutsWorker ...

On a CPU vLLM (0.32) packs weights in its own layout when it loads them, and again when it loads others, but not those
of an output layer that is tied to the input embedding: that one would stay the first one for ever. The server's Python
imports this file alone: nothing of rollouts is installed there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class RolloutsWorker:
    """Mixed into each of the server's workers; `POST /collective_rpc` calls these methods by name."""

    model_runner: Any  # the worker's own

    def rollouts_reload(self, folder: str) -> None:
        """Load the weights in `folder`. Raises FileNotFoundError, before anything has changed, where there are none."""
        if not any(Path(folder).glob("*.safetensors")):
            raise FileNotFoundError(f"the server sees no .safetensors file in {folder}")
        self.model_runner.reload_weights(weights_path=folder)
        self.rollouts_repack()

    def rollouts_repack(self) -> None:
        """Pack anew what was packed from weights that are no more. Without effect on a GPU."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        for layer in self.model_runner.get_model().modules():
            weight = getattr(layer, "weight", None)
            # Where the weight is kept beside the packed one it may be shared; elsewhere loading has packed it.
            if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
