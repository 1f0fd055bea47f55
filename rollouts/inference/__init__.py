"""Inference engines: token ids in, token ids and logprobs out.

    base.py        the seam: GenerateRequest, Generation, the Protocol of an engine (no torch)
    hf.py          the embedded engine: shares the trainer's parameters, reproducible by seed
      engine.py    the torch side: one wave, in batches that fit; scores of given tokens
      waves.py     when a batch forms (trio side)
      decode.py    the loop that samples one wave, and where a session's cache is kept between turns
      lanes.py     rows decoded together over `kv_cache.py`: one padded buffer, rows leave and join in place
      plain.py     the slower way, for models whose cache is not plain full attention
      probe.py     which of the two ways a model takes, found by trying it
      sampling.py  a random stream for each request; logits to ids and logprobs

Names are imported when they are first used, so that this package costs nothing to import.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "GenerateRequest": "base",
    "Generation": "base",
    "HFInference": "hf",
    "Health": "base",
    "InferenceBackend": "base",
    "VersionSpan": "base",
    "WeightUpdate": "base",
    "create_hf_inference": "hf",
}

__all__ = [
    "GenerateRequest",
    "Generation",
    "HFInference",
    "Health",
    "InferenceBackend",
    "VersionSpan",
    "WeightUpdate",
    "create_hf_inference",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
