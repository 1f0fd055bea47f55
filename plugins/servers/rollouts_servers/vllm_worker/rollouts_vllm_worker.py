"""A worker extension with which a vLLM server on a CPU can load weights.

    PYTHONPATH=<this folder> vllm serve MODEL --worker-extension-cls rollouts_vllm_worker.RolloutsWorker ...

On a CPU, vLLM (0.32) packs weights into its own layout at every load. It does not repack an output layer that is tied
to the input embedding, so that layer would keep its first weights. The server's Python imports this file alone, because
rollouts need not be installed there. So the file is in its own folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class RolloutsWorker:
    """A mixin for the server's workers. `POST /collective_rpc` calls these methods by name."""

    model_runner: Any  # an attribute of the worker

    def rollouts_reload(self, folder: str) -> None:
        """Load the weights in `folder`. Raises FileNotFoundError, and changes nothing, if the folder has no weights."""
        if not any(Path(folder).glob("*.safetensors")):
            raise FileNotFoundError(f"the server finds no .safetensors file in {folder}")
        self.model_runner.reload_weights(weights_path=folder)
        self.rollouts_repack()

    def rollouts_repack(self) -> None:
        """Repack the weights that vLLM itself does not repack. Does nothing on a GPU."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        for layer in self.model_runner.get_model().modules():
            weight = getattr(layer, "weight", None)
            # A weight that is kept beside its packed copy may be tied to another one; vLLM has repacked all other
            # weights.
            if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
