"""SGLang: the dialect of its servers (`SGLang`), and the command that starts one.

Ids go to `POST /generate`, which returns ids with logprobs. These facts were observed on 0.5.23, and the code relies on
them:

- Logprobs of a reply are at the sampling temperature (at 1 if the temperature is 0), before top-p, unless the server
  was started with SGLANG_RETURN_ORIGINAL_LOGPROB. The server does not report this, so `handshake` measures it. Logprobs
  of a prompt are always at temperature 1.
- Seeds are sent, but only a server with --enable-deterministic-inference uses them. According to its source, this needs
  an attention backend for GPUs (fa3, flashinfer, triton). It samples by seed and position, so a reply that continues
  after an abort gets the same random numbers as without the abort.
- The model's own end-of-text ids end a reply even if they are not among `stop_ids`. Only switching off all stop ids
  prevents this. So in this case `generate` requests a continuation.
- A prompt must be at least seven tokens shorter than --context-length.
- In a prompt's logprobs, the last id of the vocabulary is reported as 0.
- An abort by name ends all requests whose names start with this name. So the names of requests end with a dot.
- Replies in flight survive a reload (a pause with `retract`). Each reply reports which weights sampled which tokens.
- If a folder lacks a tensor, the server loads the rest, keeps the old tensor, and reports no error. A damaged file
  crashes the server.
- An adapter that was unloaded or evicted is loaded again from its folder when a request names it. So a name must always
  mean one folder, which must exist while the name is in use.
- A restarted server serves its first weights. Only `weight_version` in its replies shows this.

`training.weights.sync` checks that weights have arrived. --dp-size above 1 is not supported, because with it SGLang
accepts neither adapters nor broadcasts; start several servers instead. The functions for weights over
torch.distributed are at the end.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Literal

import msgspec
import trio

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, TensorInfo, WeightUpdate
from rollouts.models import revisions
from rollouts.plugins.checks import checked_by
from rollouts_servers.checks import other_weights
from rollouts_servers.dialect import (
    ADAPTER_PREFIX,
    Dialect,
    Finish,
    GroupCalls,
    GroupPlace,
    RequestTarget,
    Sampled,
    ServerInfo,
    WeightSpan,
    finish_of,
)
from rollouts_servers.http import HTTPClient, HTTPFailure
from rollouts_servers.options import (
    SERVED_MODEL,
    EnginePackage,
    ServedRun,
    ServerOptions,
    create_server_pool,
    is_older,
    offline,
)
from rollouts_servers.process import ServerCommand
from rollouts_servers.server_pool import ServerPool

MINIMUM_VERSION = "0.5.22"  # the first version in which updates over torch.distributed have a begin and an end
PACKAGE = EnginePackage("sglang", f"pip install 'sglang>={MINIMUM_VERSION}'", MINIMUM_VERSION)
SEEDS = 2**63  # the server stores seeds as int64
CONTINUE_SECONDS = 60.0
JOIN_SECONDS = 120.0
NEITHER = "its weights are now a mixture of old and new ones: restart it"
BUCKET_BYTES = 2**30  # a server needs this much extra memory while it loads a bucket
BYTES_OF = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}

# A request with status 400 and one of these messages succeeds at another server, or after the weights are loaded again.
_RETRYABLE_WORDS = ("Duplicate request ID", "never been loaded", "Failed to implicitly load LoRA")

Logprob = tuple[float | None, int, Any]
"""The logprob, the id, and the text or null."""


class SGLangSampling(msgspec.Struct, frozen=True):
    """The sampling parameters of one request. All parameters of the distribution are sent, because a server may have
    other defaults (--preferred-sampling-params). An unknown key gives status 400.
    """

    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_stop_trim: bool = True
    skip_special_tokens: bool = False


class SGLangRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request with ids [L]. `extra_key` separates caches."""

    rid: str
    input_ids: list[int]
    sampling_params: SGLangSampling
    lora_path: str | None = None
    extra_key: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1


class SGLangFinish(msgspec.Struct, frozen=True):
    """Why a reply ended. It has a `status_code` if the server aborted by itself."""

    type: str
    message: str = ""
    status_code: int | None = None


class Meta(msgspec.Struct, frozen=True):
    """The metadata of a reply."""

    finish_reason: SGLangFinish
    weight_version: str = ""  # at the time of the request
    weight_versions: list[WeightSpan] = []
    output_token_logprobs: list[Logprob] = []
    input_token_logprobs: list[Logprob] = []


class SGLangReply(msgspec.Struct, frozen=True):
    """The reply to one request, with ids [K]."""

    output_ids: list[int]
    meta_info: Meta


class ServedInfo(msgspec.Struct, frozen=True):
    """The settings at a server's start. (/model_info shows later changes; its name is the path of the last reload.)"""

    version: str
    served_model_name: str
    max_req_input_len: int | None = None
    enable_lora: bool | None = False
    max_lora_rank: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1


class _Card(msgspec.Struct, frozen=True):
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Card]


class SGLang(Dialect):
    """The dialect of SGLang."""

    software = "SGLang"
    keeps_requests = True
    scores_adapters_alone = False
    adapter_path = ""
    adapter_flags = "--enable-lora --max-lora-rank {rank} --lora-target-modules all"
    weights_flags = ""  # no flag needed
    logprobs_flags = "SGLANG_RETURN_ORIGINAL_LOGPROB=0 in its environment"

    async def handshake(self, client: HTTPClient) -> ServerInfo:
        """Identify the server, and measure the temperature of its logprobs. Raises ConfigError, HTTPFailure."""
        info = await server_info(client)
        if is_older(info.version, MINIMUM_VERSION):
            needed = f"{MINIMUM_VERSION} or newer is needed; type {PACKAGE.install} on its machine, and restart it"
            raise ConfigError(f"SGLang {info.version} at {client.url} is too old: {needed}")
        await _check_control(client)
        models = await client.get("/v1/models", _Models)
        limits = [info.max_req_input_len, *(card.max_model_len for card in models.data[:1])]
        return ServerInfo(
            software=f"SGLang {info.version}",
            models=(info.served_model_name,),
            context_tokens_max=min((limit for limit in limits if limit), default=0),
            logprobs=await self.logprobs_convention(client),
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
            sampling = SGLangSampling(
                request.max_tokens - start,
                request.temperature,
                request.stop_ids,
                ignore_eos=not request.stop_ids,  # switches off every stop id
                sampling_seed=request.seed % SEEDS,
            )
            reply = await _generate(client, _body(target, tokens, sampling))
            meta = reply.meta_info
            finish = _read_finish(meta.finish_reason, client.url)
            logprobs += read_logprobs(meta.output_token_logprobs, reply.output_ids, client.url)
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
        body = _body(target, tokens, SGLangSampling(0, 1.0), logprob_start_len=0)
        found = (await _generate(client, body)).meta_info.input_token_logprobs
        if len(found) != len(tokens):
            raise InferenceError(f"{client.url} returned {len(found)} logprobs for {len(tokens)} prompt tokens")
        # It reports the last id of the vocabulary as 0.
        named = [(value, said or token, text) for (value, said, text), token in zip(found, tokens, strict=True)]
        return [0.0, *read_logprobs(named[1:], tokens[1:], client.url)]

    async def abort(self, client: HTTPClient, names: Sequence[str]) -> None:
        """End these requests; each returns its tokens so far. The server ignores unknown names. It handles requests
        that arrived during a pause after the pause.
        """
        for name in names:
            await client.post("/abort_request", {"rid": rid_of(name)}, bytes)

    async def load_full(self, client: HTTPClient, update: WeightUpdate) -> None:
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
            async with paused(client):
                await client.post("/update_weights_from_disk", body, bytes, attempts_max=1)
        except HTTPFailure as failure:
            raise _load_failure(client.url, update, failure) from failure


# --- requests and replies ---------------------------------------------------------------------------------------------


def rid_of(name: str) -> str:
    """The request id for a name. An abort ends all ids with its prefix, so no id of this run is a prefix of another."""
    return f"{name}."


def _body(
    target: RequestTarget, tokens: list[int], sampling: SGLangSampling, logprob_start_len: int = -1
) -> SGLangRequest:
    """The body of a request."""
    is_adapter = target.model.startswith(ADAPTER_PREFIX)
    return SGLangRequest(
        rid_of(target.name),
        tokens,
        sampling,
        lora_path=target.model if is_adapter else None,  # the server would read the base model's name as an adapter
        extra_key=target.salt or None,
        return_logprob=True,
        logprob_start_len=logprob_start_len,
    )


async def _generate(client: HTTPClient, body: SGLangRequest) -> SGLangReply:
    """Send one request. Raises HTTPFailure; it is retryable also if the server no longer has the weights."""
    try:
        reply = await client.post("/generate", body, SGLangReply)
    except HTTPFailure as failure:
        if failure.status == 400 and any(words in str(failure) for words in _RETRYABLE_WORDS):
            raise HTTPFailure("server", str(failure), retryable=True, status=400) from failure
        raise
    _check_weights(client.url, body, reply.meta_info)
    return reply


def _check_weights(url: str, body: SGLangRequest, meta: Meta) -> None:
    """Raise HTTPFailure if the reply comes from older weights than the request expects."""
    expected = (body.extra_key or "").rpartition("-")[2]  # `Server` appends the version to the salt
    # Version 0 are the weights of the server's start. An adapter has its version in its name.
    if body.lora_path is not None or not expected.isdecimal() or expected == "0":
        return
    served = {span.version for span in meta.weight_versions} or {meta.weight_version}
    # Later versions are valid: they arrived during the request.
    if any(not name.isdecimal() or int(name) < int(expected) for name in served):
        raise other_weights(url, ", ".join(sorted(served)), expected)


def read_logprobs(found: Sequence[Logprob], ids: Sequence[int], url: str) -> list[float]:
    """The logprobs [K] of these ids [K]. Raises InferenceError if the ids differ or a value is not finite."""
    if [entry[1] for entry in found] != list(ids):
        raise InferenceError(f"{url} returned {len(ids)} token ids, and {len(found)} logprobs that do not match them")
    logprobs = []
    for value, token, _ in found:
        if value is None or not math.isfinite(value):
            raise InferenceError(f"{url} returned no finite logprob for token {token}: {value}")
        logprobs.append(min(value, 0.0))  # rounding may give a certain token a logprob above 0
    return logprobs


async def server_info(client: HTTPClient) -> ServedInfo:
    """The server's settings. The reply contains its API key, so never show it. Raises ConfigError, HTTPFailure."""
    try:
        return await client.get("/server_info", ServedInfo)
    except HTTPFailure as failure:
        if failure.status != 404 and failure.kind != "garbage":
            raise
        advice = "give --inference.url the address of one, without a path"
        raise ConfigError(f"{client.url} is not an SGLang server; {advice}") from failure


@asynccontextmanager
async def paused(client: HTTPClient) -> AsyncIterator[None]:
    """Pause the server during this block. Replies in flight wait. After the block, also after an exception, it computes
    their keys and values anew with the current weights.
    """
    resume = partial(client.post, "/continue_generation", {}, bytes, timeout_seconds=CONTINUE_SECONDS)
    try:
        await client.post("/pause_generation", {"mode": "retract"}, bytes)
        yield
    except BaseException:  # the server may have paused even if the request failed
        with trio.CancelScope(shield=True), suppress(HTTPFailure):  # the first error explains more
            await resume()
        raise
    with trio.CancelScope(shield=True):
        await resume()


async def _check_control(client: HTTPClient) -> None:
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
        await client.post("/abort_request", {"rid": rid_of("none")}, bytes)
    except HTTPFailure as failure:
        if failure.status not in (401, 403):
            raise
        raise ConfigError(
            f"{client.url} has an admin key (--admin-api-key), and refuses aborts and new weights without it: start "
            "the server with --api-key alone, or with --admin-api-key alone, and use that key"
        ) from None


def _read_finish(reason: SGLangFinish, url: str) -> Finish:
    """Why a reply ended. Raises InferenceError; HTTPFailure if the server aborted by itself."""
    finish = finish_of(reason.type, url)
    if reason.status_code is not None:
        words = f"{url} aborted a request: {reason.message}"
        raise HTTPFailure("server", words, retryable=reason.status_code != 400, status=reason.status_code)
    return finish


def _load_failure(url: str, update: WeightUpdate, failure: HTTPFailure) -> InferenceError:
    if failure.status == 400 and "weights iterator" in str(failure):
        advice = "it still serves the old weights; can its machine read that folder?"
    elif failure.status is not None and failure.status < 500:
        advice = NEITHER
    else:
        advice = "it crashed or hangs: restart it, and read its log"
    what = f"the weights of version {update.version} from {update.path}"
    return InferenceError(f"{url} did not load {what}: {failure}; {advice}", is_transient=False)


# --- weights over torch.distributed -----------------------------------------------------------------------------------

# In a process group, the trainer is rank 0, and the workers of a server (`group_ranks`) are the ranks after it. This
# sequence was tested with gloo on CPUs:
#
#     store = TCPStore(address, port, world_size, is_master=True, wait_for_workers=False)            # rank 0, first
#     await join_group(...)   beside   group = ProcessGroupGloo(prefixed, 0, world_size, timeout)    # each waits
#     receive(...) beside group.broadcast([tensor], options).wait() for each of `infos`, in order
#     await leave_group(...)
#
# A server creates its group with torch's `_new_process_group_helper`, which puts its keys under prefixes of the store.
# To join, use `prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))` ("cuda/" for NCCL,
# according to torch's source). The store may listen on loopback alone (`master_listen_fd`). Both sides used torch 2.13.
# You can reuse a name after `leave_group`.
#
# A server does not notice a tensor that its model lacks (it is dropped), nor a missing tensor (the old one stays). It
# does notice a wrong shape (status 400; earlier tensors are loaded) and, with gloo, a trainer that dies (status 400 at
# once). It waits half an hour, torch's timeout, for a trainer that sends nothing. The trainer's side is in
# `rollouts_servers.broadcast`.


async def group_ranks(client: HTTPClient) -> int:
    """The number of ranks of this server: one per worker. Raises ConfigError, HTTPFailure."""
    info = await server_info(client)
    if info.dp_size != 1 or info.pp_size != 1:
        only = "--inference.transport distributed needs 1 for both; start one server for each replica"
        raise ConfigError(f"{client.url} runs with --dp-size {info.dp_size} --pp-size {info.pp_size}; {only}")
    return info.tp_size


async def join_group(client: HTTPClient, place: GroupPlace, *, rank: int = 1) -> None:
    """Join the group as `rank` and the ranks after it (`group_ranks` in total). Returns when all ranks have joined, so
    rank 0 must join at the same time. Raises InferenceError.
    """
    body = {
        "master_address": place.address,
        "master_port": place.port,
        "rank_offset": rank,
        "world_size": place.world_size,
        "group_name": place.name,
        "backend": place.backend,
    }
    try:
        await _post(client, "/init_weights_update_group", body, timeout_seconds=JOIN_SECONDS)
    except HTTPFailure as failure:
        where, advice = (
            f"{place.address}:{place.port}",
            "can it reach that address, and has it the trainer's torch version?",
        )
        words = f"{client.url} did not join the group {place.name!r} at {where}: {failure}; {advice}"
        raise InferenceError(words, is_transient=False) from failure


async def receive(
    client: HTTPClient,
    infos: Sequence[TensorInfo],
    version: int,
    *,
    name: str,
    bucket_bytes: int = BUCKET_BYTES,
    receiving: Callable[[], None] = lambda: None,
) -> None:
    """Receive tensors from rank 0 of the group `name`, in this order, and serve them as `version` without caches of the
    old ones. Replies in flight then continue with the new weights.

    `receiving` is called when the server is about to receive. Start the broadcast only then, so that the trainer does
    not wait for a server that refuses the request. Tensors are loaded in buckets of `bucket_bytes`. Raises
    InferenceError; after this error the server's weights are a mixture of old and new ones.
    """
    assert infos, f"no tensors of version {version}"
    buckets = list(_buckets(infos, bucket_bytes))
    try:
        async with paused(client):
            await _begin(client)
            receiving()
            for place, bucket in enumerate(buckets, 1):
                is_last = place == len(buckets)
                body = {
                    "names": [info.name for info in bucket],
                    "dtypes": [_dtype(info) for info in bucket],
                    "shapes": [list(info.shape) for info in bucket],
                    "group_name": name,
                    "flush_cache": is_last,
                    "weight_version": str(version) if is_last else None,
                }
                await _post(client, "/update_weights_from_distributed", body)
            await _post(client, "/end_weight_update", {})
    except HTTPFailure as failure:
        words = f"{client.url} did not receive the weights of version {version} from the group {name!r}: {failure}"
        raise InferenceError(f"{words}; {NEITHER}", is_transient=False) from failure


async def leave_group(client: HTTPClient, *, name: str) -> None:
    """Leave the group, if the server is in it. Raises HTTPFailure."""
    try:
        await _post(client, "/destroy_weights_update_group", {"group_name": name})
    except HTTPFailure as failure:
        if failure.status != 400:
            raise


async def _begin(client: HTTPClient) -> None:
    """Begin an update. If an earlier update is still open, end it first. Raises HTTPFailure."""
    try:
        await _post(client, "/begin_weight_update", {})
    except HTTPFailure as failure:
        if "already open" not in str(failure):
            raise
        await _post(client, "/end_weight_update", {})
        await _post(client, "/begin_weight_update", {})


async def _post(client: HTTPClient, path: str, body: object, *, timeout_seconds: float | None = None) -> None:
    await client.post(path, body, bytes, timeout_seconds=timeout_seconds, attempts_max=1)


def _buckets(infos: Iterable[TensorInfo], bytes_max: int) -> Iterator[list[TensorInfo]]:
    """Split the tensors, in order, into buckets of at most `bytes_max`, or of one larger tensor."""
    bucket: list[TensorInfo] = []
    size = 0
    for info in infos:
        own = math.prod(info.shape) * BYTES_OF.get(_dtype(info), 1)
        if bucket and size + own > bytes_max:
            yield bucket
            bucket, size = [], 0
        bucket.append(info)
        size += own
    if bucket:
        yield bucket


def _dtype(info: TensorInfo) -> str:
    return info.dtype.removeprefix("torch.")


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
    return create_server_pool(SGLang(), serve_sglang, PACKAGE, run, options, groups=groups)


def serve_sglang(
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
