"""What the fake of SGLang 0.5.23 says (`fake_engines.py`)."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]
from fake_core import Adapter, Core, Job, Sampling  # noqa: E402
from fake_model import CorruptFileError  # noqa: E402
from fake_speech import VERSIONS, RefusedError, Speech  # noqa: E402

HELD_BACK = 7  # tokens of the context that no prompt may have
HEALTH_SECONDS = 0.3  # a real one takes one and more
SAMPLING_KEYS = frozenset(
    "max_new_tokens temperature top_p top_k min_p stop stop_token_ids stop_regex no_stop_trim ignore_eos n "
    "min_new_tokens frequency_penalty presence_penalty repetition_penalty skip_special_tokens logit_bias "
    "spaces_between_special_tokens sampling_seed json_schema regex ebnf structural_tag custom_params "
    "stream_interval".split()
)
ADMIN_PATHS = frozenset(
    "/abort_request /flush_cache /load_lora_adapter /unload_lora_adapter /update_weights_from_disk "
    "/update_weight_version /begin_weight_update /end_weight_update /pause_generation /continue_generation".split()
)
ROUTES = {
    "GET /health": "health_generate",
    "GET /health_generate": "health_generate",
    "GET /ready": "ready",
    "GET /model_info": "model_info",
    "GET /get_model_info": "model_info",
    "GET /server_info": "server_info",
    "GET /get_server_info": "server_info",
    "GET /v1/models": "models",
    "POST /tokenize": "tokenize",
    "POST /v1/tokenize": "tokenize",
    "POST /generate": "generate",
    "POST /abort_request": "abort_request",
    "GET /flush_cache": "flush_cache",
    "POST /flush_cache": "flush_cache",
    "POST /load_lora_adapter": "load_adapter",
    "POST /unload_lora_adapter": "unload_adapter",
    "POST /update_weights_from_disk": "update_weights_from_disk",
    "POST /update_weight_version": "update_weight_version",
    "POST /begin_weight_update": "done",
    "POST /end_weight_update": "done",
    "POST /pause_generation": "pause_generation",
    "POST /continue_generation": "continue_generation",
}


class SGLang(Speech):
    """SGLang 0.5.23: its native endpoint, an adapter a name, reloads from disk, pauses."""

    open_prefixes = ("/health", "/ready", "/metrics")
    admin_paths = ADMIN_PATHS
    routes = ROUTES

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.known: dict[str, str] = {}  # the folder of every adapter that was ever loaded, and not unloaded

    @staticmethod
    def refusal(message: str) -> RefusedError:
        """An error in SGLang's shape."""
        return RefusedError(400, {"error": {"message": message}})

    async def health_generate(self, _: Any, __: Any) -> None:
        await asyncio.sleep(HEALTH_SECONDS)
        if "dead_engine" in self.core.faults:
            raise RefusedError(503, "")

    async def ready(self, _: Any, __: Any) -> None:
        if self.core.paused:
            raise RefusedError(503, "")

    async def done(self, _: Any, __: Any) -> Any:
        return {"success": True, "message": "Success"}

    async def model_info(self, _: Any, __: Any) -> Any:
        return {
            "model_path": self.core.loaded_path,
            "served_model_name": self.options.served_model,
            "tokenizer_path": self.options.model,
            "is_generation": True,
            "weight_version": self.core.version,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
        }

    async def server_info(self, _: Any, __: Any) -> Any:
        options = self.options
        return {
            "model_path": options.model,
            "served_model_name": options.served_model,
            "context_length": self.core.context,
            "dtype": "float32",
            "device": "cpu",
            "enable_lora": bool(options.lora_rank) or None,
            "max_lora_rank": options.lora_rank or None,
            "lora_target_modules": ["all"] if options.lora_rank else None,
            "max_loras_per_batch": 3,
            "max_loaded_loras": options.loaded_loras,
            "disable_radix_cache": False,
            "max_total_num_tokens": 16384,
            "max_req_input_len": self.core.context - HELD_BACK,
            "dp_size": 1,
            "api_key": options.api_key or None,  # it says so to whoever has it
            "weight_version": "default",  # as it was started; /model_info has the one of now
            "internal_states": [{"weight_load_mem_usage": 0.0}],
            "version": options.version or VERSIONS["sglang"],
            "frontend": "python",
        }

    # --- tokens ---

    def _sampling(self, given: Mapping[str, Any], tokens: Sequence[int]) -> Sampling:
        unknown = sorted(set(given) - SAMPLING_KEYS)
        if unknown:
            raise self.refusal(f"Unexpected keyword argument '{unknown[0]}'")
        self._imitated(given)
        if any(not 0 <= token < self.core.vocabulary for token in tokens):
            os._exit(1)  # as it does
        wanted = given.get("max_new_tokens")
        wanted = 128 if wanted is None else int(wanted)
        if len(tokens) > self.core.context - HELD_BACK:
            raise self.refusal(f"Input length ({len(tokens)} tokens) exceeds the maximum allowed length")
        if len(tokens) + wanted > self.core.context:
            words = f"Requested token count exceeds the model's maximum context length of {self.core.context} tokens."
            raise self.refusal(f"{words} You requested {len(tokens)} tokens and {wanted} for the completion.")
        return Sampling(  # a sampling_seed has no effect
            wanted,
            float(given.get("temperature", 1.0)),
            None,
            frozenset(given.get("stop_token_ids") or ()),
            bool(given.get("ignore_eos")),
            int(given.get("min_new_tokens") or 0),
            float(given.get("top_p", 1.0)),
            max(0, int(given.get("top_k", -1))),
            float(given.get("min_p") or 0.0),
            {int(token): bias for token, bias in (given.get("logit_bias") or {}).items()},
        )

    async def _adapter(self, name: str | None) -> Adapter | None:
        if not name:
            return None
        if not self.options.lora_rank:
            words = f"LoRA adapter '{name}' was requested, but LoRA is not enabled."
            raise self.refusal(f"{words} Please launch the server with --enable-lora flag and preload adapters.")
        if name not in self.core.adapters:
            if name not in self.known:
                words = f"Got LoRA adapter that has never been loaded: {name}"
                raise self.refusal(f"{words} All loaded adapters: {sorted(self.known)}.")
            refused = await self._load(name, self.known[name])  # it was evicted
            if refused:
                raise self.refusal(f"Failed to implicitly load LoRA adapter {name}: {refused}")
        self.core.adapters[name] = self.core.adapters.pop(name)
        return self.core.adapters[name]

    async def generate(self, body: dict[str, Any], _: Any) -> Any:
        given, ids = body.get("sampling_params") or {}, body["input_ids"]
        is_batch = bool(ids) and isinstance(ids[0], list)
        prompts: list[list[int]] = ids if is_batch else [ids]
        if not all(prompts):
            raise self.refusal("input_ids cannot be empty")
        copies = int(given.get("n") or 1)
        rids = body.get("rid") or [os.urandom(8).hex() for _ in prompts]
        rids = [rids] if isinstance(rids, str) else rids
        if {job.name for job in self.core.jobs} & set(rids):
            raise self.refusal(f"Duplicate request ID detected: {rids[0]}")
        adapter = await self._adapter(body.get("lora_path"))
        salt = f"{body.get('extra_key') or ''}{body.get('cache_salt') or ''}"
        jobs = [
            Job(rid if copies == 1 else f"{rid}_{copy}", tokens, self._sampling(given, tokens), adapter, salt)
            for rid, tokens in zip(rids, prompts, strict=True)
            for copy in range(copies)
        ]
        for job in jobs:
            job.top = int(body.get("top_logprobs_num") or 0)
        start = body.get("logprob_start_len", -1)
        wanted = body.get("return_logprob") and start is not None and start >= 0
        score_from = int(start) if wanted else None
        await asyncio.gather(*(self.core.run(job, score_from) for job in jobs))
        replies = [self._reply(job, bool(body.get("return_logprob")), score_from) for job in jobs]
        return replies if is_batch or copies > 1 else replies[0]

    def _reply(self, job: Job, with_logprobs: bool, score_from: int | None) -> dict[str, Any]:
        reason: dict[str, Any] = {"type": job.finish}
        if job.finish == "length":
            reason["length"] = job.sampling.max_tokens
        elif job.finish == "stop":
            reason["matched"] = job.stop
        else:
            reason["message"] = "Unknown error" if job.has_begun else "Abort in waiting queue"
        meta = {"id": job.name, "finish_reason": reason, "weight_version": self.core.version, "e2e_latency": 0.01}
        if with_logprobs:
            drawn = zip(job.logprobs, job.sampled, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in drawn]
            meta["output_token_logprobs_length"] = len(job.sampled)
            meta["input_token_logprobs"] = []
            if job.top:
                meta["output_top_logprobs"] = [[[value, token, None] for value, token in top] for top in job.tops]
            if score_from is not None and job.scores:
                scored = list(zip([None, *job.scores[1:]], job.prompt, strict=True))[score_from:]
                meta["input_token_logprobs"] = [[logprob, token, None] for logprob, token in scored]
        if job.has_begun:
            meta |= {"prompt_tokens": len(job.prompt), "completion_tokens": len(job.sampled)}
            meta |= {"cached_tokens": job.cached, "weight_versions": job.spans()}
        return {"text": "", "output_ids": job.sampled, "meta_info": meta}

    async def abort_request(self, body: dict[str, Any], _: Any) -> None:
        """Every request whose name begins so, but for those that came while it was paused."""
        rid, every = body.get("rid") or "", bool(body.get("abort_all"))
        self.core.abort(lambda job: not job.is_late and (every or job.name.startswith(rid)))

    async def flush_cache(self, _: Any, __: Any) -> str:
        if any(job.state is not None for job in self.core.jobs):
            raise RefusedError(400, "Flush cache failed.\n")
        self.core.reset_cache()
        return "Cache flushed.\nPlease check backend logs for more details.\n"

    # --- weights ---

    async def _load(self, name: str, folder: str) -> str:
        """Empty, or why it is not loaded."""
        core = self.core
        if not self.options.lora_rank:
            return "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        if name in core.adapters:
            return f"Failed to load LoRA adapter {name} because it is already loaded"
        try:
            adapter = await core.read_adapter(name, folder)
        except OverflowError as error:
            words = f"LoRA adapter {name} with rank {error} is incompatible with the current LoRA memory pool"
            return f"{words} configuration. Please ensure that the rank is within the configured `--max-lora-rank`."
        except (OSError, CorruptFileError, ValueError, KeyError) as error:
            return str(error)
        core.adapters[name] = adapter
        self.known[name] = folder
        while len(core.adapters) > self.options.loaded_loras:
            del core.adapters[next(iter(core.adapters))]  # without a word
        return ""

    def _loaded(self, error: str) -> Any:
        loaded = {each.name: each.path for each in self.core.adapters.values()}
        reply = {"rid": None, "success": not error, "error_message": error or None, "loaded_adapters": loaded}
        if error:
            raise RefusedError(400, reply)
        return reply

    async def load_adapter(self, body: dict[str, Any], _: Any) -> Any:
        return self._loaded(await self._load(body["lora_name"], body["lora_path"]))

    async def unload_adapter(self, body: dict[str, Any], _: Any) -> Any:
        name = body["lora_name"]
        known = self.known.pop(name, None)
        await self.core.drained(lambda job: job.adapter is not None and job.adapter.name == name)
        self.core.adapters.pop(name, None)
        return self._loaded("" if known else f"LoRA with name {name} does not exist")

    async def update_weights_from_disk(self, body: dict[str, Any], _: Any) -> Any:
        """What runs ends first, unless it is paused. A file that cannot be read is the end."""
        core = self.core
        if body.get("abort_all_requests"):
            core.abort(lambda _: True)
        core.is_loading = not core.paused
        try:
            if not core.paused:
                await core.drained()
            await core.load_full(body["model_path"])
        except CorruptFileError:
            os._exit(1)
        except (OSError, ValueError) as error:
            reply = {"success": False, "message": f"Failed to get weights iterator: {error}.", "num_paused_requests": 0}
            raise RefusedError(400, reply) from None
        finally:
            core.is_loading = False
            core.wake()
        if body.get("flush_cache", True):
            if any(job.state is not None for job in core.jobs):
                words = (
                    "Weights were updated, but the cache was not flushed because requests are still running or queued."
                )
                raise RefusedError(400, {"success": False, "message": words, "num_paused_requests": 0})
            core.reset_cache()
        core.version = body.get("weight_version") or core.version
        message = f"Succeeded to update model weights. Weight version updated to {core.version}."
        return {"success": True, "message": message, "num_paused_requests": 0}

    async def update_weight_version(self, body: dict[str, Any], _: Any) -> Any:
        self.core.version = body["new_version"]
        return {"success": True, "message": "Weight version updated", "new_version": body["new_version"]}

    async def pause_generation(self, body: dict[str, Any], _: Any) -> Any:
        self.core.pause(body.get("mode", "abort"))
        if self.core.paused == "abort":
            await self.core.drained()
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def continue_generation(self, _: Any, __: Any) -> Any:
        self.core.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}
