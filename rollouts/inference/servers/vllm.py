"""vLLM: what its server is asked and answers (`VLLM`, the dialect), and how one is started.

    --inference vllm                                       # start one, from this environment or --inference.python
    --inference vllm --inference.url http://gpu7:8000      # use one that runs; several with commas between

Token ids go in and come out at `POST /inference/v1/generate`; chat would render its parsed calls anew. Seen on a real
server (0.32), and what follows from it here:

- Logprobs are of temperature 1, unless it was started with `--logprobs-mode processed_logprobs`; this is measured.
- A prompt is scored at temperature 1 always.
- An end-of-sequence id ends a reply whether asked or not: it is asked to ignore it, so that `stop_ids` alone decide.
- The id by which a request is aborted is the one that was sent, with a prefix.
- An adapter loaded again under its name (`load_inplace`) changes requests under way as soon as another one of that name
  joins them, on top of a cache of the old adapter. So each version has a name of its own, and each request keeps its.
- New weights of everything are loaded while it pauses; it then computes anew what it had read, so that requests go on
  as if under the new weights from the first token on. Its prefix cache is not emptied by loading: that is asked for.
- On a CPU an output layer that is tied to the embedding stays the first one: `vllm_worker` mends that.
- A prompt that is scored with an adapter kills it, on a CPU, where other requests are in the batch: the adapter's part
  of the logits has their number of rows. So it scores alone then.
- On a CPU a prompt that is read in pieces, for a request with a seed, kills it too: it is started to read whole ones.
- A load that failed leaves it without weights, and the next request would kill it: so it stays paused, and a load that
  succeeds mends it.

Left out: weights over torch.distributed, and what all servers share (`server`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import trio

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, WeightUpdate
from rollouts.inference.servers.dialect import FINISHES, RequestTarget, Sampled, ServerInfo, ids_of_text
from rollouts.inference.servers.http import HTTPClient, HTTPFailure, PlainClient
from rollouts.inference.servers.options import (
    SERVED_MODEL,
    EnginePackage,
    ServedRun,
    ServerOptions,
    context_of,
    create_server_pool,
    offline,
    version_numbers,
)
from rollouts.inference.servers.process import ServerCommand, background
from rollouts.inference.servers.server_pool import ServerPool

MINIMUM_VERSION = "0.32"  # the first that all of this was seen on
PACKAGE = EnginePackage("vllm", f"pip install 'vllm>={MINIMUM_VERSION}'", MINIMUM_VERSION)
GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
REQUEST_PREFIX = "generate-tokens-"  # that the server puts before a request's name
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank takes
# What a server on a CPU needs to load weights (see there).
EXTENSION_FOLDER, EXTENSION = Path(__file__).with_name("vllm_worker"), "rollouts_vllm_worker.RolloutsWorker"
CPU_BATCHED_TOKENS = 8192
LEFT_SECONDS = 60.0  # a load goes on so long when its run ends: what it leaves paused, no run can use
# Far from 1, so that one token tells the two conventions apart; more than one, in case it does not.
MEASURED_TEMPERATURE, MEASURED_TOKENS = 2.0, 4  # above 2 it refuses
NOISE_NATS = 0.05

# --- what is said, and answered: fields that are not read are left out, which is most of what makes decoding cheap ----


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request is sampled. `logprobs` 0: those of the sampled ids alone. vLLM ignores unknown keys."""

    max_tokens: int
    temperature: float
    ignore_eos: bool
    detokenize: bool
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class GenerateBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request: ids [L] in."""

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
    """Those of a choice [K]."""

    content: list[TokenLogprob]


class Span(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, end) are of the weights called `version`."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True):
    """One answer: ids [K] out, and why it ended."""

    token_ids: list[int]
    finish_reason: str
    logprobs: Logprobs | None = None
    weight_versions: list[Span] | None = None


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    """The logprob of one prompt token."""

    logprob: float


class GenerateReply(msgspec.Struct, frozen=True):
    """The answers to one request; the prompt's logprobs [L] by id where they were asked for (the first is None)."""

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
    """What a server was started with."""

    lora_config: _Part | None = None
    model_config: _Part = _Part()
    device_config: _Part = _Part()
    parallel_config: _Part = _Part()

    @property
    def is_extended(self) -> bool:
        """It has our worker extension."""
        return self.parallel_config.worker_extension_cls == EXTENSION


class _ServerInfo(msgspec.Struct):
    vllm_config: _Config


# --- the dialect ------------------------------------------------------------------------------------------------------


class VLLM:
    """Implements Dialect."""

    software = "vLLM"
    keeps_requests = True
    scores_adapters_alone = True
    adapter_flags = (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment and --enable-lora --max-lora-rank {rank} "
        "--max-loras 2 --max-cpu-loras 4"
    )
    weights_flags = (
        f"VLLM_SERVER_DEV_MODE=1 in its environment, and on a CPU with PYTHONPATH={EXTENSION_FOLDER} too and "
        f"--worker-extension-cls {EXTENSION}"
    )
    logprobs_flags = "--logprobs-mode processed_logprobs"

    async def handshake(self, client: PlainClient) -> ServerInfo:
        """Version, models, what it was started with; and one token is sampled and scored."""
        version = await self._version(client)
        models = (await client.get("/v1/models", _Models)).data
        config = await self._config(client)
        if config is not None and (await client.get("/is_paused", _Paused)).is_paused:
            why = "as a run that was killed while it sent weights leaves it"
            raise ConfigError(f"vLLM at {client.url} is paused, {why}: start it again")
        if config is not None and config.model_config.logprobs_mode.endswith("logits"):
            raise ConfigError(_words_of_logits(client))
        logprobs = await self._convention(client)
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

    async def _version(self, client: PlainClient) -> str:
        try:
            version = (await client.get("/version", _Version)).version
        except HTTPFailure as failure:
            if failure.kind in ("garbage", "client") and failure.status not in (401, 403):
                raise ConfigError(
                    f"{client.url} answers, but not as vLLM {MINIMUM_VERSION} or later does ({failure}); see whether "
                    "the URL is the server's, without /v1"
                ) from failure
            raise
        numbers = version_numbers(version)
        if "dev" not in version and numbers and numbers < version_numbers(MINIMUM_VERSION):
            needed = f"{MINIMUM_VERSION} or later is needed: {PACKAGE.install} where it runs, and start it again"
            raise ConfigError(f"{client.url} is vLLM {version}; {needed}")
        return version

    async def _config(self, client: PlainClient) -> _Config | None:
        """What it was started with; None: it does not say, since its development endpoints are off."""
        try:
            return (await client.get("/server_info?config_format=json", _ServerInfo)).vllm_config
        except HTTPFailure as failure:
            if failure.status == 404:
                return None
            raise

    async def _convention(self, client: PlainClient) -> Literal["processed", "raw"]:
        """Of which temperature its logprobs are, by comparing a token's with its score, which is of temperature 1."""
        for first in range(MEASURED_TOKENS):
            request = GenerateRequest([first], 1, (), first, temperature=MEASURED_TEMPERATURE)
            target = RequestTarget(f"rollouts-greets-{secrets.token_hex(4)}")
            try:
                sampled = await self.generate(client, request, target)
            except HTTPFailure as failure:
                if failure.status in (403, 404, 405):
                    raise ConfigError(
                        f"vLLM at {client.url} does not take token ids ({failure}): start it with --enable-scale-out"
                    ) from failure
                raise
            tokens, logprob = [first, *sampled.tokens], sampled.logprobs[0]
            raw = (await self.score(client, tokens, target))[1]
            if max(logprob, raw) > NOISE_NATS:
                raise ConfigError(_words_of_logits(client))
            if abs(logprob - raw) > NOISE_NATS * max(1.0, abs(raw)):
                return "processed"
        return "raw"

    async def _loads_adapters(self, client: PlainClient, config: _Config | None) -> bool:
        """Seen by what it says of a folder that is not there: it may lack the endpoint, or what is behind it."""
        if config is not None and config.lora_config is None:
            return False
        body = {"lora_name": "rollouts-greets", "lora_path": "/nonexistent/rollouts-greets"}
        try:
            await client.post("/v1/load_lora_adapter", body, bytes, attempts_max=1)
        except HTTPFailure as failure:
            if failure.status in (401, 403) or failure.status is None:
                raise
            return "No adapter found" in str(failure)
        return True

    async def generate(self, client: HTTPClient, request: GenerateRequest, target: RequestTarget) -> Sampled:
        """One request; an aborted one comes back with its ids and logprobs so far."""
        sampling = SamplingParams(
            request.max_tokens, request.temperature, True, False, request.stop_ids, _seed(request), logprobs=0
        )
        body = GenerateBody(target.name, request.tokens, sampling, target.model, target.salt)
        return read_reply(await client.post(GENERATE, body, GenerateReply))

    async def score(self, client: HTTPClient, tokens: list[int], target: RequestTarget) -> list[float]:
        """Logprobs of a prompt, of temperature 1."""
        sampling = SamplingParams(1, 0.0, True, False, prompt_logprobs=0)
        body = GenerateBody(target.name, tokens, sampling, target.model, target.salt)
        reply = await client.post(GENERATE, body, GenerateReply)
        found = reply.prompt_logprobs
        if found is None or len(found) != len(tokens):
            raise InferenceError(
                f"{client.url} was asked for the logprobs of {len(tokens)} prompt tokens and returned "
                f"{'none' if found is None else len(found)}"
            )
        scores = [0.0]
        for token, entry in zip(tokens[1:], found[1:], strict=True):
            if entry is None or str(token) not in entry:
                raise InferenceError(f"{client.url} returned no logprob for token {token} of a prompt")
            scores.append(entry[str(token)].logprob)
        return scores

    async def abort(self, client: PlainClient, names: Sequence[str]) -> None:
        """By the names that the server has for them."""
        body = {"request_ids": [REQUEST_PREFIX + name for name in names]}
        await client.post(ABORT, body, bytes)

    async def load_full(self, client: PlainClient, update: WeightUpdate) -> None:
        """Pause, load, say the version, forget every cache, go on. A load that fails leaves it paused: it has no
        weights. Where this is cancelled meanwhile, the rest is still done, for `LEFT_SECONDS` at most.
        """
        # Twice, since it closes connections after a failure of its own without saying so.
        post = partial(client.post, attempts_max=2)
        config, folder = await self._config(client), _absolute(update)
        call: Any = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        if config is not None and config.is_extended:
            call = {"method": "rollouts_reload", "kwargs": {"folder": folder}}
        shielded, has_weights = trio.CancelScope(shield=True), True

        async def bound() -> None:
            try:
                await trio.sleep_forever()
            finally:
                shielded.deadline = trio.current_time() + LEFT_SECONDS

        async with background(bound):
            with shielded:
                try:
                    await post("/pause?mode=keep", {}, bytes)
                    has_weights = False
                    try:
                        await post("/collective_rpc", call, bytes, attempts_max=1)
                    except HTTPFailure as failure:
                        raise InferenceError(
                            f"{failure}; it stays paused until weights are loaded that it can read. Does it see "
                            f"{folder}, and is it the same model?"
                        ) from failure
                    has_weights = True
                    await post("/update_weight_version", {"new_version": str(update.version)}, bytes)
                    if not (await post("/reset_prefix_cache?reset_running_requests=true", {}, _Done)).success:
                        raise InferenceError(f"{client.url} did not empty its prefix cache: it is of the old weights")
                except InferenceError:
                    if has_weights:
                        with contextlib.suppress(HTTPFailure):  # what went wrong before says more
                            await post("/resume", {}, bytes)
                    raise
                await post("/resume", {}, bytes)

    async def load_adapter(self, client: PlainClient, update: WeightUpdate, *, old: str) -> str:
        """Under a name of its own, so that those under way keep theirs; the server may remember names of other runs."""
        name = f"rollouts-v{update.version}-{secrets.token_hex(4)}"
        if old:
            await self.unload_adapter(client, old)
        body = {"lora_name": name, "lora_path": _absolute(update)}
        await client.post("/v1/load_lora_adapter", body, bytes, attempts_max=1)
        return name

    async def unload_adapter(self, client: PlainClient, name: str) -> None:
        """Forget it. Raises HTTPFailure."""
        try:
            await client.post("/v1/unload_lora_adapter", {"lora_name": name}, bytes)
        except HTTPFailure as failure:
            if failure.status != 404:  # it was started again meanwhile, and knows none
                raise

    async def tokenize(self, client: PlainClient, text: str) -> list[int] | None:
        """None where it was started without a tokenizer."""
        return await ids_of_text(client, text, without_tokenizer=(400, 404, 501))


def _absolute(update: WeightUpdate) -> str:
    """The server has another working folder."""
    assert update.path is not None, update
    return str(Path(update.path).absolute())


def _words_of_logits(client: HTTPClient) -> str:
    return f"vLLM at {client.url} gives logits for logprobs: start it with --logprobs-mode processed_logprobs"


def _seed(request: GenerateRequest) -> int:
    """No server can skip the random numbers that are spent: a reply that goes on gets others, not the first ones again.

    Within what vLLM takes, 0 <= it < 2**63.
    """
    return (request.seed + request.offset * 0x9E3779B97F4A7C15) % 2**63


def read_reply(reply: GenerateReply) -> Sampled:
    """The ids [K] of the only choice, their logprobs [K], and why it ended. Raises InferenceError."""
    if len(reply.choices) != 1:
        raise InferenceError(f"the server was asked for one answer and returned {len(reply.choices)}")
    choice: Choice = reply.choices[0]
    content = choice.logprobs.content if choice.logprobs is not None else []
    if [entry.token_id for entry in content] != choice.token_ids:
        raise InferenceError(
            f"the server returned {len(choice.token_ids)} token ids and logprobs of {len(content)}, or of other tokens"
        )
    finish = FINISHES.get(choice.finish_reason)
    if finish is None:
        expected = ", ".join(FINISHES)
        raise InferenceError(f"the server ended an answer with {choice.finish_reason!r}, expected {expected}")
    spans = tuple((span.version, span.start, span.end) for span in choice.weight_versions or ())
    return Sampled(choice.token_ids, [entry.logprob for entry in content], finish, spans)


# --- starting one -----------------------------------------------------------------------------------------------------


def serve_command(
    python: str, model: str, port: int, options: ServerOptions, *, lora_rank: int = 0, seed: int = 0
) -> ServerCommand:
    """How `python`, which has vLLM installed, serves `model` on the loopback interface, with all that is needed here.

    Without a GPU: in float32 and without compiling, which is what trains there.
    """
    dtype = "float32" if options.on_cpu and options.dtype == "auto" else options.dtype
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--served-model-name", options.served_model or SERVED_MODEL, "--dtype", dtype]
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--seed", str(seed)]
    argv += ["--disable-uvicorn-access-log"]
    # The first is what pausing and loading weights stand behind; the server listens on this machine only.
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
        # A prompt that is read in several pieces for a request with a seed kills it there (0.32). To read whole ones it
        # wants a step to have room for the longest that there may be.
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
    """vLLM servers: those at `url`, or `servers` of them that are started here and end with the run.

    Args:
        python: The interpreter of the environment that vLLM is installed in. Empty: this one.
        memory_share: The part of a GPU's memory that a server that is started takes. 0: what vLLM takes by itself.
        flags: More flags for servers that are started, as vLLM takes them.

    Raises ConfigError, ModelError.
    """
    run = ServedRun(model, training, seed, temperature, folder, concurrency, lora_rank)
    return create_server_pool(VLLM(), serve_command, PACKAGE, run, options)
