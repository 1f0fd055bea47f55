"""vLLM: the dialect of its servers (`VLLM`), and the command that starts one.

    --inference vllm                                       # start one, from this environment or --inference.python
    --inference vllm --inference.url http://gpu7:8000      # use one that runs; several with commas between

`POST /inference/v1/generate` takes and returns token ids. (The chat endpoint would parse tool calls and render them
again.) These facts were observed on version 0.32, and the code relies on them:

- Logprobs are at temperature 1, unless the server was started with `--logprobs-mode processed_logprobs`. `handshake`
  measures this. Logprobs of a prompt are always at temperature 1.
- An end-of-sequence id always ends a reply. So requests set `ignore_eos`, and only `stop_ids` end a reply.
- The server puts a prefix before a request's id. An abort needs the id with the prefix.
- An adapter that is loaded again under its name (`load_inplace`) changes requests in flight as soon as another request
  of that name joins them, on top of the old adapter's cache. So each version gets its own name, and each request keeps
  the name of its adapter.
- Full weights are loaded during a pause. Afterwards the server computes the contexts of running requests anew, so that
  they continue as if the new weights had computed everything. Loading does not empty the prefix cache; a separate
  request does.
- On a CPU, an output layer that is tied to the embedding keeps its first weights. `vllm_worker` repairs that.
- On a CPU, scoring a prompt with an adapter beside other requests crashes the server, because the adapter's part of the
  logits has the wrong number of rows. So scoring requests with an adapter run alone.
- On a CPU, a chunked prefill of a request with a seed crashes the server. So it is started without chunked prefill.
- After a failed load the server has no weights, and the next request would crash it. So it stays paused until a load
  succeeds.

Weights over torch.distributed are not supported.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, WeightUpdate
from rollouts.models import revisions
from rollouts_servers.dialect import Dialect, RequestTarget, Sampled, ServerInfo, WeightSpan, absolute_folder, finish_of
from rollouts_servers.http import HTTPClient, HTTPFailure
from rollouts_servers.options import (
    SERVED_MODEL,
    EnginePackage,
    ServedRun,
    ServerOptions,
    context_of,
    create_server_pool,
    is_older,
    offline,
)
from rollouts_servers.process import ServerCommand, in_background
from rollouts_servers.server_pool import ServerPool

MINIMUM_VERSION = "0.32"  # the oldest tested version
PACKAGE = EnginePackage("vllm", f"pip install 'vllm>={MINIMUM_VERSION}'", MINIMUM_VERSION)
GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
REQUEST_PREFIX = "generate-tokens-"  # the server adds it to a request's id
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of --max-lora-rank
# A server on a CPU needs this extension to load weights.
EXTENSION_FOLDER, EXTENSION = Path(__file__).with_name("vllm_worker"), "rollouts_vllm_worker.RolloutsWorker"
CPU_BATCHED_TOKENS = 8192
LEFT_SECONDS = 60.0  # after a cancellation, a load gets this long to finish, because a paused server would be unusable

# --- requests and replies: types list only the fields that we read, which makes decoding cheap ------------------------


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampling parameters of one request. `logprobs` 0: of the sampled ids alone. vLLM ignores unknown keys."""

    max_tokens: int
    temperature: float
    ignore_eos: bool
    detokenize: bool
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class VLLMRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request with ids [L]."""

    request_id: str
    token_ids: list[int]
    sampling_params: SamplingParams
    model: str = ""
    cache_salt: str = ""


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """One sampled id with its logprob."""

    token_id: int
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    """The logprobs [K] of a choice."""

    content: list[TokenLogprob]


class Choice(msgspec.Struct, frozen=True):
    """One sampled reply: ids [K], and why it ended."""

    token_ids: list[int]
    finish_reason: str
    logprobs: Logprobs | None = None
    weight_versions: list[WeightSpan] | None = None


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    """The logprob of one prompt token."""

    logprob: float


class GenerateReply(msgspec.Struct, frozen=True):
    """The reply to one request, with the prompt's logprobs [L] by id if requested (the first is None)."""

    choices: list[Choice]
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Paused(msgspec.Struct):
    is_paused: bool


class _Done(msgspec.Struct):
    success: bool


class _Version(msgspec.Struct):
    version: str


class _Part(msgspec.Struct, frozen=True):
    max_lora_rank: int = 0
    logprobs_mode: str = ""
    device: str = ""
    worker_extension_cls: str = ""


class _Config(msgspec.Struct):
    """The settings of a server's start."""

    lora_config: _Part | None = None
    model_config: _Part = _Part()
    device_config: _Part = _Part()
    parallel_config: _Part = _Part()

    @property
    def is_extended(self) -> bool:
        """Whether the server has the worker extension of rollouts."""
        return self.parallel_config.worker_extension_cls == EXTENSION


class _ServerInfo(msgspec.Struct):
    vllm_config: _Config


# --- the dialect ------------------------------------------------------------------------------------------------------


class VLLM(Dialect):
    """The dialect of vLLM."""

    software = "vLLM"
    keeps_requests = True
    scores_adapters_alone = True
    adapter_path = "/v1"
    adapter_flags = (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment and --enable-lora --max-lora-rank {rank} "
        "--max-loras 2 --max-cpu-loras 4"
    )
    weights_flags = (
        f"VLLM_SERVER_DEV_MODE=1 in its environment, and on a CPU with PYTHONPATH={EXTENSION_FOLDER} too and "
        f"--worker-extension-cls {EXTENSION}"
    )
    logprobs_flags = "--logprobs-mode processed_logprobs"

    async def handshake(self, client: HTTPClient) -> ServerInfo:
        """Identify the server, and measure the temperature of its logprobs. Raises ConfigError, HTTPFailure."""
        version = await self._version(client)
        models = (await client.get("/v1/models", _Models)).data
        config = await self._config(client)
        if config is not None and (await client.get("/is_paused", _Paused)).is_paused:
            why = "perhaps because a run was killed while it sent weights"
            raise ConfigError(f"vLLM at {client.url} is paused, {why}: restart the server")
        if config is not None and config.model_config.logprobs_mode.endswith("logits"):
            raise self.logits_error(client)
        try:
            logprobs = await self.logprobs_convention(client)
        except HTTPFailure as failure:
            if failure.status in (403, 404, 405):
                raise ConfigError(
                    f"vLLM at {client.url} does not take token ids ({failure}): start it with --enable-scale-out"
                ) from failure
            raise
        base = [model for model in models if model.parent is None]
        return ServerInfo(
            f"vLLM {version}",
            tuple(model.id for model in base),
            max((model.max_model_len or 0 for model in base), default=0),
            logprobs,
            await self._loads_adapters(client, config),
            config.lora_config.max_lora_rank if config is not None and config.lora_config is not None else 0,
            config is not None and (config.is_extended or config.device_config.device != "cpu"),
        )

    async def _version(self, client: HTTPClient) -> str:
        try:
            version = (await client.get("/version", _Version)).version
        except HTTPFailure as failure:
            if failure.kind in ("garbage", "client") and failure.status not in (401, 403):
                raise ConfigError(
                    f"{client.url} answers, but not like vLLM {MINIMUM_VERSION} or later ({failure}); check that the "
                    "URL is the server's, without /v1"
                ) from failure
            raise
        if is_older(version, MINIMUM_VERSION):
            needed = f"{MINIMUM_VERSION} or later is needed: type {PACKAGE.install} on its machine, and restart it"
            raise ConfigError(f"{client.url} is vLLM {version}; {needed}")
        return version

    async def _config(self, client: HTTPClient) -> _Config | None:
        """The settings of the server's start; None if its development endpoints are off."""
        try:
            return (await client.get("/server_info?config_format=json", _ServerInfo)).vllm_config
        except HTTPFailure as failure:
            if failure.status == 404:
                return None
            raise

    async def _loads_adapters(self, client: HTTPClient, config: _Config | None) -> bool:
        """Whether the server loads adapters: its error for a missing folder shows whether the endpoint works."""
        if config is not None and config.lora_config is None:
            return False
        body = {"lora_name": "rollouts-handshake", "lora_path": "/nonexistent/rollouts-handshake"}
        try:
            await client.post("/v1/load_lora_adapter", body, bytes, attempts_max=1)
        except HTTPFailure as failure:
            if failure.status in (401, 403) or failure.status is None:
                raise
            return "No adapter found" in str(failure)
        return True

    async def generate(self, client: HTTPClient, request: GenerateRequest, target: RequestTarget) -> Sampled:
        """Sample one turn. An aborted request returns its ids and logprobs so far. Raises InferenceError."""
        sampling = SamplingParams(
            request.max_tokens, request.temperature, True, False, request.stop_ids, _seed(request), logprobs=0
        )
        body = VLLMRequest(target.name, request.tokens, sampling, target.model, target.salt)
        return read_generate_reply(await client.post(GENERATE, body, GenerateReply), client.url)

    async def score(self, client: HTTPClient, tokens: list[int], target: RequestTarget) -> list[float]:
        """The logprob of each token [L] at temperature 1; the first is 0.0. Raises InferenceError."""
        sampling = SamplingParams(1, 0.0, True, False, prompt_logprobs=0)
        body = VLLMRequest(target.name, tokens, sampling, target.model, target.salt)
        reply = await client.post(GENERATE, body, GenerateReply)
        found = reply.prompt_logprobs
        if found is None or len(found) != len(tokens):
            count = "no" if found is None else len(found)
            raise InferenceError(f"{client.url} returned {count} logprobs for {len(tokens)} prompt tokens")
        scores = [0.0]
        for token, entry in zip(tokens[1:], found[1:], strict=True):
            if entry is None or str(token) not in entry:
                raise InferenceError(f"{client.url} returned no logprob for token {token} of a prompt")
            scores.append(entry[str(token)].logprob)
        return scores

    async def abort(self, client: HTTPClient, names: Sequence[str]) -> None:
        """End these requests; each returns its tokens so far."""
        body = {"request_ids": [REQUEST_PREFIX + name for name in names]}
        await client.post(ABORT, body, bytes)

    async def load_full(self, client: HTTPClient, update: WeightUpdate) -> None:
        """Pause the server, load, set the version, empty every cache, and resume.

        After a failed load the server has no weights, so it stays paused. If this call is cancelled, the remaining
        steps get `LEFT_SECONDS` to finish. Raises InferenceError.
        """
        # Two attempts, because the server closes connections after an internal error.
        post = partial(client.post, attempts_max=2)
        config, folder = await self._config(client), absolute_folder(update)
        call: Any = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        if config is not None and config.is_extended:
            call = {"method": "rollouts_reload", "kwargs": {"folder": folder}}
        shielded, has_weights = trio.CancelScope(shield=True), True

        async def bound() -> None:
            try:
                await trio.sleep_forever()
            finally:
                shielded.deadline = trio.current_time() + LEFT_SECONDS

        async with in_background(bound):
            with shielded:
                try:
                    await post("/pause?mode=keep", {}, bytes)
                    has_weights = False
                    try:
                        await post("/collective_rpc", call, bytes, attempts_max=1)
                    except HTTPFailure as failure:
                        raise InferenceError(
                            f"{failure}; the server stays paused until a load succeeds. Check that it can read "
                            f"{folder} and serves the same model"
                        ) from failure
                    has_weights = True
                    await post("/update_weight_version", {"new_version": str(update.version)}, bytes)
                    if not (await post("/reset_prefix_cache?reset_running_requests=true", {}, _Done)).success:
                        raise InferenceError(
                            f"{client.url} did not clear its prefix cache, which still holds results of the old weights"
                        )
                except InferenceError:
                    if has_weights:
                        with contextlib.suppress(HTTPFailure):  # the first error explains more
                            await post("/resume", {}, bytes)
                    raise
                await post("/resume", {}, bytes)


def _seed(request: GenerateRequest) -> int:
    """The seed for the server, 0 <= seed < 2**63.

    vLLM cannot skip used random numbers, so a continued reply gets another seed instead of the same numbers again.
    """
    return (request.seed + request.offset * 0x9E3779B97F4A7C15) % 2**63


def read_generate_reply(reply: GenerateReply, url: str) -> Sampled:
    """The single choice of a reply from `url`: ids [K], their logprobs [K], and why it ended. Raises InferenceError."""
    if len(reply.choices) != 1:
        raise InferenceError(f"{url} returned a reply with {len(reply.choices)} choices, expected 1")
    choice: Choice = reply.choices[0]
    content = choice.logprobs.content if choice.logprobs is not None else []
    if [entry.token_id for entry in content] != choice.token_ids:
        given = f"{len(choice.token_ids)} token ids, and {len(content)} logprobs that do not match them"
        raise InferenceError(f"{url} returned {given}")
    finish = finish_of(choice.finish_reason, url)
    spans = tuple((span.version, span.start, span.end) for span in choice.weight_versions or ())
    return Sampled(choice.token_ids, [entry.logprob for entry in content], finish, spans)


# --- starting a server ------------------------------------------------------------------------------------------------


def serve_vllm(
    python: str, model: str, port: int, options: ServerOptions, *, lora_rank: int = 0, seed: int = 0
) -> ServerCommand:
    """The command that starts a server with the interpreter `python`, on loopback only.

    Without a GPU it computes in float32, like the trainer, and does not compile.
    """
    dtype = "float32" if options.on_cpu and options.dtype == "auto" else options.dtype
    name, revision = revisions.location(model)
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", name, "--host", "127.0.0.1"]
    argv += ["--revision", revision, "--tokenizer-revision", revision] if revision else []
    argv += ["--port", str(port), "--served-model-name", options.served_model or SERVED_MODEL, "--dtype", dtype]
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--seed", str(seed)]
    argv += ["--disable-uvicorn-access-log"]
    # VLLM_SERVER_DEV_MODE enables pausing and loading weights; the server listens on loopback only.
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"} | offline(model)
    if options.context_tokens:
        argv += ["--max-model-len", str(options.context_tokens)]
    if lora_rank:
        rank = next((rank for rank in LORA_RANKS if rank >= lora_rank), lora_rank)
        argv += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2", "--max-cpu-loras", "4"]
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if options.on_cpu:
        argv += ["--enforce-eager", "--worker-extension-cls", EXTENSION]
        context = options.context_tokens or context_of(model)
        # On a CPU, a chunked prefill with a seed crashes the server (0.32). Without chunks, a step must have room for
        # the longest prompt.
        argv += ["--no-enable-chunked-prefill"] if context else []
        argv += ["--max-num-batched-tokens", str(max(CPU_BATCHED_TOKENS, context))]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(EXTENSION_FOLDER), os.environ.get("PYTHONPATH", "")]))
        env["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    else:
        argv += ["--gpu-memory-utilization", str(options.memory_share)] if options.memory_share else []
        argv += ["--tensor-parallel-size", str(options.gpu_count)] if options.gpu_count > 1 else []
    return ServerCommand([*argv, *options.flags], env)


VLLM_OPTIONS = ServerOptions(api_key_env="VLLM_API_KEY")


def create_vllm_inference(
    model: str,
    training: Any,
    seed: int,
    temperature: float,
    folder: str,
    concurrency: int,
    lora_rank: int,
    *,
    options: ServerOptions = VLLM_OPTIONS,
) -> ServerPool:
    """vLLM servers: those at `url`, or `servers` new ones, which end with the run.

    Args:
        python: The Python interpreter of the environment that has vLLM. Empty: this one.
        memory_share: The share of GPU memory for a started server. 0: vLLM's default.
        flags: More flags of vLLM for started servers.

    Raises ConfigError, ModelError.
    """
    run = ServedRun(model, training, seed, temperature, folder, concurrency, lora_rank)
    return create_server_pool(VLLM(), serve_vllm, PACKAGE, run, options)
