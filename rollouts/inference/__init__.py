"""Inference engines: token ids in, token ids and logprobs out.

    base.py        the seam: GenerateRequest, Generation, the Protocol of an engine (no torch)
    carried.py     the engine as one episode sees it, where that can be stopped in mid-reply and go on later
    hf.py          the embedded engine: shares the trainer's parameters, reproducible by seed
      engine.py    the torch side: one wave, in batches that fit; scores of given tokens
      waves.py     when a batch forms (trio side)
      decode.py    the loop that samples one wave, and where a session's cache is kept between turns
      lanes.py     rows decoded together over `kv_cache.py`: one padded buffer, rows leave and join in place
      plain.py     the slower way, for models whose cache is not plain full attention
      probe.py     which of the two ways a model takes, found by trying it
      sampling.py  a random stream for each request; logits to ids and logprobs
    http/          one server asked many things at once: connections, limits, retries, failures
    remote.py      one server behind it as an engine
      dialect.py   what one kind of server is told: `vllm.py`, `sglang.py`
      sglang_wire.py  shapes; `sglang_group.py` full weights over a process group, `groups.py` what that asks of any
    openai.py      any chat-completions API, for evaluation; `chatting.py` is its seam: messages instead of ids
    pool.py        several servers as one engine: who is asked, what becomes of requests whose server dies
      members.py   one of them over its whole life: watched, brought back, given the last weights
    serving.py     where they come from: URLs, or started here
      launching.py a server's process, its port and log; `guardian.py` ends it with us

Names are imported when they are first used, so that this package costs nothing to import.
"""

from __future__ import annotations

from rollouts.lazy import lazy_face

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

__getattr__, __dir__ = lazy_face(__name__, _HOMES)
