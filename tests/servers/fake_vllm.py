"""What the fake of vLLM 0.32 says (`fake_engines.py`)."""

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

ALWAYS = {
    "GET /health": "health",
    "GET /version": "software",
    "GET /v1/models": "models",
    "POST /tokenize": "tokenize",
    "POST /v1/completions": "completions",
}
SCALE_OUT = {"POST /inference/v1/generate": "generate", "POST /inference/v1/abort_requests": "abort_requests"}
ADAPTERS = {"POST /v1/load_lora_adapter": "load_adapter", "POST /v1/unload_lora_adapter": "unload_adapter"}
DEVELOPMENT = {
    "GET /server_info": "server_info",
    "GET /is_paused": "is_paused",
    "GET /weight_info": "weight_info",
    "POST /abort_requests": "abort_requests",
    "POST /collective_rpc": "collective_rpc",
    "POST /finish_weight_update": "finish_weight_update",
    "POST /init_weight_transfer_engine": "init_weight_transfer_engine",
    "POST /pause": "pause",
    "POST /reset_prefix_cache": "reset_prefix_cache",
    "POST /resume": "resume",
    "POST /start_weight_update": "start_weight_update",
    "POST /update_weight_version": "update_weight_version",
    "POST /update_weights": "update_weights",
}


class VLLM(Speech):
    """vLLM 0.32: the token endpoint, completions with ids, adapters in place, reloads, pauses."""

    guarded_prefixes = ("/v1", "/v2", "/inference", "/cohere")

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.is_updating = False
        scale_out = SCALE_OUT if self.options.scale_out else dict.fromkeys(SCALE_OUT, "no_scale_out")
        if self._release() < (0, 30):
            scale_out = {}  # older ones have no such endpoint
        self.routes = ALWAYS | scale_out
        self.routes |= ADAPTERS if self.options.runtime_lora else {}
        self.routes |= DEVELOPMENT if self.options.dev_mode else {}

    def _release(self) -> tuple[int, ...]:
        version = self.options.version or VERSIONS["vllm"]
        return tuple(int(part) for part in version.split(".")[:2])

    @staticmethod
    def refusal(status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> RefusedError:
        """An error in vLLM's shape."""
        return RefusedError(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})

    async def no_scale_out(self, _: Any, __: Any) -> Any:
        message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
        raise self.refusal(403, message, "PermissionDeniedError")

    async def software(self, _: Any, __: Any) -> Any:
        return {"version": self.options.version or VERSIONS["vllm"]}

    async def server_info(self, _: Any, query: dict[str, str]) -> Any:
        options = self.options
        lora = {"max_lora_rank": options.lora_rank, "max_loras": 2, "max_cpu_loras": options.loaded_loras}
        config: Any = {
            "model_config": {
                "model": options.model,
                "served_model_name": options.served_model,
                "max_model_len": self.core.context,
                "dtype": "torch.float32",
                "logprobs_mode": options.logprobs_mode,
                "max_logprobs": 20,
                "seed": 0,
            },
            "cache_config": {"block_size": self.core.cache.block, "enable_prefix_caching": True},
            "lora_config": lora if options.lora_rank else None,
            "weight_transfer_config": {"backend": "fake"} if options.weight_transfer else None,
        }
        if query.get("config_format") != "json":
            config = ", ".join(f"{name}={value!r}" for part in config.values() for name, value in (part or {}).items())
        env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": options.runtime_lora, "VLLM_SERVER_DEV_MODE": True}
        return {"vllm_config": config, "vllm_env": env, "system_env": {}}

    # --- tokens ---

    def _adapter(self, model: str | None) -> Adapter | None:
        if not model or model == self.options.served_model:
            return None
        if model not in self.core.adapters:
            raise self.refusal(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
        return self.core.adapters[model]

    def _sampling(self, given: Mapping[str, Any], tokens: Sequence[int], default: int) -> Sampling:
        """Unknown keys are ignored, as it does."""
        self._imitated(given)
        limit = self.core.context
        if len(tokens) >= limit:
            words = f"This model's maximum context length is {limit} tokens. However, your prompt contains"
            raise self.refusal(400, f"{words} {len(tokens)} input tokens. Please reduce the length.")
        strange = [token for token in tokens if not 0 <= token < self.core.vocabulary]
        if strange:
            raise self.refusal(400, f"Token id {strange[0]} is out of vocabulary")
        wanted = given.get("max_tokens") or default
        if len(tokens) + wanted > limit:
            words = f"This model's maximum context length is {limit} tokens. However, you requested {wanted} output"
            raise self.refusal(400, f"{words} tokens and your prompt contains {len(tokens)} input tokens.")
        return Sampling(
            wanted,
            float(given.get("temperature", 1.0)),
            given.get("seed"),
            frozenset(given.get("stop_token_ids") or ()),
            bool(given.get("ignore_eos")),
            int(given.get("min_tokens") or 0),
            float(given.get("top_p") or 1.0),
            int(given.get("top_k") or 0),
            float(given.get("min_p") or 0.0),
            {int(token): bias for token, bias in (given.get("logit_bias") or {}).items()},
        )

    async def _jobs(self, name: str, tokens: list[int], given: dict[str, Any], body: dict[str, Any]) -> list[Job]:
        if self.core.is_broken:
            self._die_soon()
            raise self.refusal(
                500, "EngineCore encountered an issue. See stack trace for the root cause.", "EngineDead"
            )
        adapter = self._adapter(body.get("model"))
        sampling = self._sampling(given, tokens, body["_default"] or self.core.context - len(tokens))
        seed = sampling.seed
        jobs = [
            Job(name, tokens, sampling._replace(seed=None if seed is None else seed + i), adapter, body["_salt"])
            for i in range(int(given.get("n") or 1))
        ]
        score_from = None if given.get("prompt_logprobs") is None else 0
        await asyncio.gather(*(self.core.run(job, score_from) for job in jobs))
        return jobs

    def _prompt_logprobs(self, job: Job) -> list[Any] | None:
        if not job.scores:
            return None
        named = zip(job.prompt[1:], job.scores[1:], strict=True)
        return [None, *({str(t): {"logprob": lp, "rank": None, "decoded_token": None}} for t, lp in named)]

    async def generate(self, body: dict[str, Any], _: Any) -> Any:
        name = f"generate-tokens-{body.get('request_id') or os.urandom(8).hex()}"
        given, tokens = body["sampling_params"], body["token_ids"]
        if not tokens or min(tokens) < 0:
            raise self.refusal(400, "token_ids must not contain negative values, and at least one")
        jobs = await self._jobs(name, tokens, given, {**body, "_default": 0, "_salt": body.get("cache_salt") or ""})
        choices = [
            {
                "index": index,
                "finish_reason": job.finish,
                "stop_reason": None if job.stop == self.core.eos else job.stop,
                "token_ids": job.sampled,
                "weight_versions": job.spans(),
                "logprobs": None if given.get("logprobs") is None else {"content": self._content(job)},
            }
            for index, job in enumerate(jobs)
        ]
        return {
            "request_id": name,
            "model": body.get("model"),
            "choices": choices,
            "usage": self._usage(jobs),
            "prompt_token_ids": tokens if body.get("return_token_ids") else None,
            "prompt_logprobs": self._prompt_logprobs(jobs[0]),
        }

    @staticmethod
    def _content(job: Job) -> list[dict[str, Any]]:
        drawn = zip(job.sampled, job.logprobs, job.ranks, strict=True)
        entries = [{"token_id": token, "logprob": logprob, "rank": rank} for token, logprob, rank in drawn]
        return [{**entry, "top_logprobs": [entry]} for entry in entries]

    @staticmethod
    def _usage(jobs: Sequence[Job]) -> dict[str, Any]:
        prompt, replied = len(jobs[0].prompt), sum(len(job.sampled) for job in jobs)
        details = {"cached_tokens": jobs[0].cached}
        usage = {"prompt_tokens": prompt, "completion_tokens": replied, "total_tokens": prompt + replied}
        return {**usage, "prompt_tokens_details": details}

    async def completions(self, body: dict[str, Any], _: Any) -> Any:
        name, tokens = f"cmpl-{body.get('request_id') or os.urandom(8).hex()}", body["prompt"]
        assert isinstance(tokens, list), "the fake takes prompts of ids only"
        jobs = await self._jobs(name, tokens, body, {**body, "_default": 16, "_salt": body.get("cache_salt") or ""})
        asked = body.get("return_token_ids")
        choices = [
            {
                "index": index,
                "text": "",
                "finish_reason": job.finish,
                "stop_reason": None if job.stop == self.core.eos else job.stop,
                "logprobs": None if body.get("logprobs") is None else {"token_logprobs": job.logprobs},
                "token_ids": job.sampled if asked else None,
                "prompt_token_ids": tokens if asked else None,
                "prompt_logprobs": self._prompt_logprobs(job),
            }
            for index, job in enumerate(jobs)
        ]
        model = body.get("model") or self.options.served_model
        return {"id": name, "object": "text_completion", "model": model, "choices": choices, "usage": self._usage(jobs)}

    async def abort_requests(self, body: dict[str, Any], _: Any) -> Any:
        """Names are whole, with their prefix; none at all is all of them. All requests of a name are aborted, whoever
        sent them: two that run may have the same.
        """
        names = body.get("request_ids")
        if names:
            self.core.abort(lambda job: job.name in names)
        else:
            names = [job.name for job in self.core.jobs]
            self.core.abort(lambda _: True)
        return {"status": "aborted", "aborted": len(names)}

    # --- weights ---

    async def load_adapter(self, body: dict[str, Any], _: Any) -> Any:
        name, folder = body["lora_name"], body["lora_path"]
        if name == self.options.served_model:
            raise self.refusal(
                400, f"The lora adapter '{name}' conflicts with a served base model.", "InvalidUserInput"
            )
        if name in self.core.adapters and not body.get("load_inplace"):
            words = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set"
            raise self.refusal(400, f"{words} 'load_inplace' to True.", "InvalidUserInput")
        try:
            if not self.options.lora_rank:
                raise ValueError("LoRA is not enabled.")
            adapter = await self.core.read_adapter(name, folder)
        except FileNotFoundError:
            words = f"Loading lora {name} failed: No adapter found for {folder}"
            raise self.refusal(404, words, "NotFoundError") from None
        except OverflowError as error:
            words = f"LoRA rank {error} is greater than max_lora_rank {self.options.lora_rank}."
            raise self.refusal(500, words, "InternalServerError") from None
        except (CorruptFileError, ValueError, KeyError) as error:
            raise self.refusal(500, str(error), "InternalServerError") from None
        self.core.adapters[name] = adapter
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload_adapter(self, body: dict[str, Any], _: Any) -> Any:
        name = body["lora_name"]
        if self.core.adapters.pop(name, None) is None:
            raise self.refusal(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def collective_rpc(self, body: dict[str, Any], _: Any) -> Any:
        """Only reload_weights: the cache stays as it is, and what fails leaves an engine that dies of a request."""
        if body.get("method") != "reload_weights":
            raise self.refusal(500, f"'Worker' object has no attribute {body.get('method')!r}", "InternalServerError")
        try:
            await self.core.load_full(body.get("kwargs", {}).get("weights_path") or self.options.model)
        except (OSError, CorruptFileError, ValueError) as error:
            self.core.is_broken = True  # until a load succeeds
            raise self.refusal(500, f"Call to collective_rpc method failed: {error}", "InternalServerError") from None
        self.core.is_broken = False
        return {"results": [None]}

    async def init_weight_transfer_engine(self, _: Any, __: Any) -> Any:
        self._needs_transfer()
        return {"message": "Weight transfer initialized"}

    async def start_weight_update(self, _: Any, __: Any) -> Any:
        self._needs_transfer()
        self.is_updating = True
        return {"message": "Weight update started"}

    async def update_weights(self, body: dict[str, Any], _: Any) -> Any:
        """Of a backend that reads a path; one that fails leaves the weights as they were."""
        self._needs_transfer()
        if not self.is_updating:
            raise self.refusal(500, "start_weight_update must be called first", "InternalServerError")
        info = body["update_info"]
        try:
            await self.core.load_full(next(value for name, value in info.items() if name.endswith("path")))
        except (OSError, CorruptFileError, ValueError) as error:
            raise self.refusal(500, str(error), "InternalServerError") from None
        return {"message": "Weights updated"}

    async def finish_weight_update(self, body: dict[str, Any], _: Any) -> Any:
        self._needs_transfer()
        self.is_updating = False
        self.core.version = body.get("weight_version") or self.core.version
        return {"message": "Weight update finished"}

    def _needs_transfer(self) -> None:
        if not self.options.weight_transfer:
            words = "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."
            raise self.refusal(500, words, "InternalServerError")

    async def update_weight_version(self, body: dict[str, Any], _: Any) -> Any:
        self.core.version = body["new_version"]
        return {"success": True, "new_version": body["new_version"]}

    async def weight_info(self, _: Any, __: Any) -> Any:
        return {"weight_version": self.core.version}

    async def reset_prefix_cache(self, _: Any, query: dict[str, str]) -> Any:
        """Refused, with status 200, while requests run."""
        is_busy = any(job.state is not None for job in self.core.jobs)
        if is_busy and query.get("reset_running_requests") != "true":
            return {"success": False}
        self.core.reset_cache()
        for job in self.core.jobs:
            job.state = None
        return {"success": True}

    async def pause(self, _: Any, query: dict[str, str]) -> Any:
        mode = query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise self.refusal(400, f"Input should be 'abort', 'wait' or 'keep', not {mode!r}")
        self.core.pause(mode)
        if mode != "keep":
            await self.core.drained()
            if query.get("clear_cache", "true") == "true":
                self.core.reset_cache()
        return {"status": "paused"}

    async def resume(self, _: Any, __: Any) -> Any:
        self.core.resume()
        return {"status": "resumed"}

    async def is_paused(self, _: Any, __: Any) -> Any:
        return {"is_paused": bool(self.core.paused)}
