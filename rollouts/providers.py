"""Where replies come from, under the module name of the first notes: `Endpoint`, and the factories of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts_notes.checkpoint_servers import SGLangEngine as SGLangEngine
    from rollouts_notes.checkpoint_servers import VLLMEngine as VLLMEngine
    from rollouts_notes.endpoint import Endpoint as Endpoint
    from rollouts_servers.openai import create_openai_inference as create_openai_inference
    from rollouts_servers.sglang import create_sglang_inference as create_sglang_inference
    from rollouts_servers.vllm import create_vllm_inference as create_vllm_inference

    from rollouts.inference.embedded.hf import create_hf_inference as create_hf_inference

__getattr__, __dir__ = lazy_face(__name__)
