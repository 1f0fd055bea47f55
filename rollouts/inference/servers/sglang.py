"""SGLang: the dialect of its servers (`SGLang`), and the command that starts one.

Ids go to `POST /generate`, which returns ids with logprobs. These facts were observed on 0.5.23, and the code relies on
them:

- Logprobs of a reply are at the sampling temperature (at 1 if the temperature is 0), before top-p, unless the server
was started
  with SGLANG_RETURN_ORIGINAL_LOGPROB. The server does not report this, so `handshake` measures it. Logprobs of a prompt
  are always at temperature 1.
- Seeds are sent, but only a server with --enable-deterministic-inference uses them. According to its source, this needs
  an attention backend for GPUs (fa3, flashinfer, triton). It samples by seed and position, so a reply that continues
  after an abort gets the same random numbers as without the abort.
- The model's own end-of-text ids end a reply even if they are not among `stop_ids`. Only switching off all stop ids
  prevents this. So in this case `generate` requests a continuation.
- A prompt must be at least seven tokens shorter than --context-length.
- In a prompt's logprobs, the last id of the vocabulary is reported as 0.
- An abort by name ends all requests whose names start with this name. So the names of requests end with a dot. -
Replies in flight survive a reload (a pause with `retract`). Each reply reports which weights sampled which tokens. - If
a folder lacks a tensor, the server loads the rest, keeps the old tensor, and reports no error. A damaged file
  crashes the server.
- An adapter that was unloaded or evicted is loaded again from its folder when a request names it. So a name must always
  mean one folder, which must exist while the name is in use.
- A restarted server serves its first weights. Only `weight_version` in its replies shows this.

`training.weights.sync` checks that weights have arrived. --dp-size above 1 is not supported, because with it SGLang
accepts neither adapters nor broadcasts; start several servers instead. Weights over torch.distributed are in
`sglang_wire`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, WeightUpdate
from rollouts.inference.servers import sglang_wire as wire
from rollouts.inference.servers.dialect import FINISHES, GroupCalls, RequestTarget, Sampled, ServerInfo, ids_of_text
from rollouts.inference.servers.http import HTTPClient, HTTPFailure, PlainClient
from rollouts.inference.servers.options import (
    SERVED_MODEL,
    EnginePackage,
    ServedRun,
    ServerOptions,
    create_server_pool,
    offline,
    version_numbers,
)
from rollouts.inference.servers.process import ServerCommand
from rollouts.inference.servers.server_pool import ServerPool
from rollouts.inference.servers.sglang_wire import group_ranks, join_group, leave_group, receive
from rollouts.models import revisions
from rollouts.plugins.checks import checked_by

MINIMUM_VERSION = "0.5.22"  # the first version in which updates over torch.distributed have a begin and an end
PACKAGE = EnginePackage("sglang", f"pip install 'sglang>={MINIMUM_VERSION}'", MINIMUM_VERSION)
SEEDS = 2**63  # the server stores seeds as int64
PROBE_IDS, PROBE_TEMPERATURE, PROBE_TOP = [1, 2, 3], 4.0, 20


class _Card(msgspec.Struct, frozen=True):
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Card]


class SGLang:
    """Implements `Dialect`."""

    software = "SGLang"
    keeps_requests = True
    scores_adapters_alone = False
    adapter_flags = "--enable-lora --max-lora-rank {rank} --lora-target-modules all"
    weights_flags = ""  # no flag needed
    logprobs_flags = "SGLANG_RETURN_ORIGINAL_LOGPROB=0 in its environment"

    async def handshake(self, client: PlainClient) -> ServerInfo:
        """Identify the server, and measure the temperature of its logprobs. Raises ConfigError, HTTPFailure."""
        info = await wire.server_info(client)
        if version_numbers(info.version) < version_numbers(MINIMUM_VERSION):
            needed = f"{MINIMUM_VERSION} or newer is needed; type {PACKAGE.install} on its machine, and restart it"
            raise ConfigError(f"SGLang {info.version} at {client.url} is too old: {needed}")
        await _check_control(client)
        models = await client.get("/v1/models", _Models)
        limits = [info.max_req_input_len, *(card.max_model_len for card in models.data[:1])]
        return ServerInfo(
            software=f"SGLang {info.version}",
            models=(info.served_model_name,),
            context_tokens_max=min((limit for limit in limits if limit), default=0),
            logprobs=await _convention(client),
            loads_adapters=bool(info.enable_lora) and info.dp_size == 1,
            lora_rank_max=(info.max_lora_rank or 0) if info.enable_lora else 0,
        )

    async def generate(self, client: HTTPClient, request: GenerateRequest, target: RequestTarget) -> Sampled:
        """Sample one turn; its ids include the stop id. An aborted request returns its tokens so far. The seed is sent
        unchanged. Raises InferenceError.
        """
        tokens = list(request.tokens)
        logprobs: list[float] = []
        spans: list[tuple[str, int, int]] = []
        while True:
            start = len(tokens) - len(request.tokens)
            sampling = wire.Sampling(
                request.max_tokens - start,
                request.temperature,
                request.stop_ids,
                ignore_eos=not request.stop_ids,  # switches off every stop id
                sampling_seed=request.seed % SEEDS,
            )
            reply = await wire.generate(client, wire.body_of(target, tokens, sampling))
            meta = reply.meta_info
            finish = _read_finish(meta.finish_reason, client.url)
            logprobs += wire.read_logprobs(meta.output_token_logprobs, reply.output_ids, client.url)
            for span in meta.weight_versions:
                if spans and spans[-1][0] == span.version:
                    spans[-1] = (span.version, spans[-1][1], start + span.end)
                elif span.end > span.start:
                    spans.append((span.version, start + span.start, start + span.end))
            tokens += reply.output_ids
            sampled = tokens[len(request.tokens) :]
            if finish != "stop" or not sampled or sampled[-1] in request.stop_ids:
                return Sampled(sampled, logprobs, finish, tuple(spans))
            if len(sampled) >= request.max_tokens:
                return Sampled(sampled, logprobs, "length", tuple(spans))

    async def score(self, client: HTTPClient, tokens: list[int], target: RequestTarget) -> list[float]:
        """The logprob of each token [L] at temperature 1; the first is 0.0. Raises InferenceError."""
        body = wire.body_of(target, tokens, wire.Sampling(0, 1.0), logprob_start_len=0)
        found = (await wire.generate(client, body)).meta_info.input_token_logprobs
        if len(found) != len(tokens):
            raise InferenceError(f"{client.url} returned {len(found)} logprobs for {len(tokens)} prompt tokens")
        # It reports the last id of the vocabulary as 0.
        named = [(value, said or token, text) for (value, said, text), token in zip(found, tokens, strict=True)]
        return [0.0, *wire.read_logprobs(named[1:], tokens[1:], client.url)]

    async def abort(self, client: PlainClient, names: Sequence[str]) -> None:
        """End these requests; each returns its tokens so far. The server ignores unknown names. It handles requests
        that arrived during a pause after the pause.
        """
        for name in names:
            await client.post("/abort_request", {"rid": wire.rid_of(name)}, bytes)

    async def load_full(self, client: PlainClient, update: WeightUpdate) -> None:
        """Serve the weights in the folder `update.path`, with all caches flushed. Replies in flight continue with the
        new weights, which compute their keys and values anew. Raises InferenceError.
        """
        assert update.path is not None, f"version {update.version} has no folder"
        body = {
            "model_path": update.path,
            "load_format": "auto",  # without this, the server uses its `--load-format`, which may be `dummy`
            "weight_version": str(update.version),
            "flush_cache": True,
        }
        try:
            async with wire.paused(client):
                await client.post("/update_weights_from_disk", body, bytes, attempts_max=1)
        except HTTPFailure as failure:
            raise _load_failure(client.url, update, failure) from failure

    async def load_adapter(self, client: PlainClient, update: WeightUpdate, *, old: str) -> str:
        """Load the adapter in the folder `update.path` under a new name, and unload `old`.

        The folder must exist while the name is in use. Raises InferenceError.
        """
        assert update.path is not None, f"version {update.version} has no folder"
        name = f"{wire.ADAPTER_PREFIX}{update.version}-{secrets.token_hex(4)}"
        body = {"lora_name": name, "lora_path": update.path}
        try:
            await client.post("/load_lora_adapter", body, bytes, attempts_max=1)
        except HTTPFailure as failure:
            raise InferenceError(
                f"{client.url} did not load the adapter of version {update.version} in {update.path}: {failure}; "
                "check its rank against --max-lora-rank, its layers against --lora-target-modules, and that the "
                "server's machine can read that folder",
                is_transient=failure.retryable,
            ) from failure
        if old:
            await self.unload_adapter(client, old)
        return name

    async def unload_adapter(self, client: PlainClient, name: str) -> None:
        """Unload the adapter. No request may use it. Raises HTTPFailure."""
        body = {"lora_name": name}
        try:
            await client.post("/unload_lora_adapter", body, bytes, attempts_max=1)
        except HTTPFailure as failure:
            if failure.status != 400:  # 400: the adapter was evicted before
                raise

    async def tokenize(self, client: PlainClient, text: str) -> list[int] | None:
        """The server's ids of a text; None if it was started without a tokenizer."""
        return await ids_of_text(client, text, without_tokenizer=(400, 404, 500, 501))


async def _check_control(client: PlainClient) -> None:
    """Check that the server is not paused, and that the API key allows control requests. Raises ConfigError,
    HTTPFailure.
    """
    try:
        await client.get("/ready", bytes, attempts_max=1)
    except HTTPFailure as failure:
        if failure.status != 503:
            raise
        raise ConfigError(
            f"the SGLang server at {client.url} is not ready: it still loads, or an interrupted update left it "
            f"paused; if so, type: curl -X POST -H 'content-type: application/json' -d '{{}}' "
            f"{client.url}/continue_generation"
        ) from None
    try:
        await client.post("/abort_request", {"rid": wire.rid_of("none")}, bytes)
    except HTTPFailure as failure:
        if failure.status not in (401, 403):
            raise
        raise ConfigError(
            f"{client.url} has an admin key (--admin-api-key), and refuses aborts and new weights without it: start "
            "the server with --api-key alone, or with --admin-api-key alone, and use that key"
        ) from None


async def _convention(client: PlainClient) -> Literal["processed", "raw"]:
    """Whether logprobs depend on the temperature: a higher temperature brings the logprobs of the most likely tokens
    closer together.
    """
    spreads = []
    for temperature in (1.0, PROBE_TEMPERATURE):
        rid = wire.rid_of(f"handshake-{secrets.token_hex(4)}")
        body = wire.GenerateBody(
            rid, PROBE_IDS, wire.Sampling(1, temperature), return_logprob=True, top_logprobs_num=PROBE_TOP
        )
        meta = (await client.post("/generate", body, wire.Reply)).meta_info
        values = [entry[0] for entry in (meta.output_top_logprobs or [None])[0] or [] if entry[0] is not None]
        spreads.append(max(values) - min(values) if values else 0.0)
    # The threshold is halfway between the two conventions, which do not differ if all tokens are equally likely.
    return "raw" if spreads[1] > spreads[0] * (1 + 1 / PROBE_TEMPERATURE) / 2 else "processed"


def _read_finish(reason: wire.Finish, url: str) -> Literal["stop", "length", "abort"]:
    """Why a reply ended. Raises InferenceError; HTTPFailure if the server aborted by itself."""
    finish = FINISHES.get(reason.type)
    if finish is None:
        raise InferenceError(f"{url} ended a reply with {reason.type!r}, expected {', '.join(FINISHES)}")
    if reason.status_code is not None:
        words = f"{url} aborted a request: {reason.message}"
        raise HTTPFailure("server", words, retryable=reason.status_code != 400, status=reason.status_code)
    return finish


def _load_failure(url: str, update: WeightUpdate, failure: HTTPFailure) -> InferenceError:
    if failure.status == 400 and "weights iterator" in str(failure):
        advice = "it still serves the old weights; can its machine read that folder?"
    elif failure.status is not None and failure.status < 500:
        advice = wire.NEITHER
    else:
        advice = "it crashed or hangs: restart it, and read its log"
    what = f"the weights of version {update.version} from {update.path}"
    return InferenceError(f"{url} did not load {what}: {failure}; {advice}", is_transient=False)


# --- starting a server ------------------------------------------------------------------------------------------------


SGLANG_OPTIONS = ServerOptions(api_key_env="SGLANG_API_KEY")


def _check(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that do not fit together."""
    rank = values.get("lora_rank", 0)
    if values.get("transport") == "distributed" and rank:
        full = f"is for full weights, but --lora-rank {rank} trains an adapter"
        advice = "type --inference.transport disk, or --lora-rank 0"
        raise ConfigError(f"--inference.transport distributed {full}; {advice}")


@checked_by(_check)
def create_sglang_inference(
    model: str,
    training: Any,
    seed: int,
    temperature: float,
    folder: str,
    concurrency: int,
    lora_rank: int,
    *,
    options: ServerOptions = SGLANG_OPTIONS,
    transport: Literal["disk", "distributed"] = "disk",
) -> ServerPool:
    """SGLang servers: those at `url`, or `servers` new ones, which end with the run.

    Args:
        url: URLs of running servers, such as http://127.0.0.1:30000, separated by commas. Empty: start servers.
        python: The Python interpreter of the environment that has SGLang. Empty: this one.
        transport: How servers receive new weights. disk: they read files. distributed: the trainer broadcasts over
            torch.distributed (not for adapters).
        context_tokens: The limit for prompt and reply together, in tokens; SGLang reserves 6. 0: the model's limit.
        memory_share: The share of GPU memory for a started server. 0: SGLang's default.
        flags: More flags of SGLang for started servers.

    Raises ConfigError, ModelError.
    """
    run = ServedRun(model, training, seed, temperature, folder, concurrency, lora_rank)
    groups = GroupCalls(group_ranks, join_group, receive, leave_group) if transport == "distributed" else None
    return create_server_pool(SGLang(), serve_command, PACKAGE, run, options, groups=groups)


def serve_command(
    python: str, model: str, port: int, options: ServerOptions, *, lora_rank: int = 0, seed: int = 0
) -> ServerCommand:
    """The command that starts a server with the interpreter `python`, on loopback only.

    Without a GPU it uses settings with which the CUDA wheel runs on a CPU, if its CUDA imports are replaced
    (docs/engines.md). Without the two thread settings it is twenty times slower.
    """
    is_cpu, served = options.on_cpu, options.served_model or SERVED_MODEL
    name, revision = revisions.location(model)
    argv = [python, "-m", "sglang.launch_server", "--model-path", name, "--served-model-name", served]
    argv += ["--revision", revision] if revision else []
    argv += ["--host", "127.0.0.1", "--port", str(port), "--random-seed", str(seed % 2**31)]
    argv += ["--log-level-http", "warning"]  # no line for each request
    argv += ["--dtype", "float32" if is_cpu and options.dtype == "auto" else options.dtype]
    env = offline(model)
    if options.context_tokens:
        argv += ["--context-length", str(options.context_tokens)]
    if is_cpu:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}
        argv += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        argv += ["--disable-overlap-schedule", "--skip-server-warmup", "--max-running-requests", "32"]
        argv += ["--max-total-tokens", str(max(16_384, 8 * options.context_tokens))]
    elif options.gpu_count > 1:
        argv += ["--tp-size", str(options.gpu_count)]
    memory = options.memory_share or (0.3 if is_cpu else 0.0)
    if memory:
        argv += ["--mem-fraction-static", f"{memory:g}"]
    if lora_rank:
        # A batch may use the adapter, the previous adapter, and the base model, which counts too.
        argv += ["--enable-lora", "--max-lora-rank", str(lora_rank), "--lora-target-modules", "all"]
        argv += ["--max-loras-per-batch", "3", "--max-loaded-loras", "4"]
        if is_cpu:
            argv += ["--lora-backend", "torch_native"]
    return ServerCommand([*argv, *options.flags], env, ready_path="/ready")
