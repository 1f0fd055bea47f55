"""The requests and replies of SGLang's servers, pauses, and weights over torch.distributed (used by `sglang`).

Reply types list only the fields that we read; msgspec skips the others.

In a process group, the trainer is rank 0, and a server's workers (`group_ranks`) are the ranks after it. This sequence
was tested with gloo on CPUs:

    store = TCPStore(address, port, world_size, is_master=True, wait_for_workers=False)            # rank 0, first
    await join_group(...)   beside   group = ProcessGroupGloo(prefixed, 0, world_size, timeout)    # each waits
    receive(...) beside group.broadcast([tensor], options).wait() for each of `infos`, in order
    await leave_group(...)

A server creates its group with torch's `_new_process_group_helper`, which puts its keys under prefixes of the store. To
join, use `prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))` ("cuda/" for NCCL,
according to torch's source). The store may listen on loopback alone (`master_listen_fd`). Both sides used torch 2.13.
You can reuse a name after `leave_group`.

A server does not notice a tensor that its model lacks (it is dropped), nor a missing tensor (the old one stays). It
does notice a wrong shape (status 400; earlier tensors are loaded) and, with gloo, a trainer that dies (status 400 at
once). It waits half an hour, torch's timeout, for a trainer that sends nothing. The trainer's side is in
`rollouts.training.weights.broadcast`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import trio

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import TensorInfo
from rollouts.inference.servers.checks import other_weights
from rollouts.inference.servers.dialect import GroupPlace, RequestTarget
from rollouts.inference.servers.http import HTTPClient, HTTPFailure, PlainClient

ADAPTER_PREFIX = "rollouts-v"
CONTINUE_SECONDS = 60.0
JOIN_SECONDS = 120.0
NEITHER = "its weights are now a mixture of old and new ones: restart it"
BUCKET_BYTES = 2**30  # a server needs this much extra memory while it loads a bucket
BYTES_OF = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}

# A request with status 400 and one of these messages succeeds at another server, or after the weights are loaded again.
_RETRYABLE_WORDS = ("Duplicate request ID", "never been loaded", "Failed to implicitly load LoRA")

Logprob = tuple[float | None, int, Any]
"""The logprob, the id, and the text or null."""


class Sampling(msgspec.Struct, frozen=True):
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


class GenerateBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request with ids [L]. `extra_key` separates caches."""

    rid: str
    input_ids: list[int]
    sampling_params: Sampling
    lora_path: str | None = None
    extra_key: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0


class Finish(msgspec.Struct, frozen=True):
    """Why a reply ended. It has a `status_code` if the server aborted by itself."""

    type: str
    message: str = ""
    status_code: int | None = None


class Span(msgspec.Struct, frozen=True, gc=False):
    """The weights `version` sampled tokens [start, end)."""

    version: str
    start: int = 0
    end: int = 0


class Meta(msgspec.Struct, frozen=True):
    """The metadata of a reply."""

    finish_reason: Finish
    weight_version: str = ""  # at the time of the request
    weight_versions: list[Span] = []
    output_token_logprobs: list[Logprob] = []
    input_token_logprobs: list[Logprob] = []
    output_top_logprobs: list[list[Logprob] | None] = []


class Reply(msgspec.Struct, frozen=True):
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


def rid_of(name: str) -> str:
    """The request id for a name. An abort ends all ids with its prefix, so no id of this run is a prefix of another."""
    return f"{name}."


def body_of(target: RequestTarget, tokens: list[int], sampling: Sampling, logprob_start_len: int = -1) -> GenerateBody:
    """The body of a request."""
    is_adapter = target.model.startswith(ADAPTER_PREFIX)
    return GenerateBody(
        rid_of(target.name),
        tokens,
        sampling,
        lora_path=target.model if is_adapter else None,  # the server would read the base model's name as an adapter
        extra_key=target.salt or None,
        return_logprob=True,
        logprob_start_len=logprob_start_len,
    )


async def generate(client: HTTPClient, body: GenerateBody) -> Reply:
    """Send one request. Raises HTTPFailure; it is retryable also if the server no longer has the weights."""
    try:
        reply = await client.post("/generate", body, Reply)
    except HTTPFailure as failure:
        if failure.status == 400 and any(words in str(failure) for words in _RETRYABLE_WORDS):
            raise HTTPFailure("server", str(failure), retryable=True, status=400) from failure
        raise
    _check_weights(client.url, body, reply.meta_info)
    return reply


def _check_weights(url: str, body: GenerateBody, meta: Meta) -> None:
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


async def server_info(client: PlainClient) -> ServedInfo:
    """The server's settings. The reply contains its API key, so never show it. Raises ConfigError, HTTPFailure."""
    for path in ("/server_info", "/get_server_info"):
        try:
            return await client.get(path, ServedInfo)
        except HTTPFailure as failure:
            if failure.status != 404 and failure.kind != "garbage":
                raise
    raise ConfigError(f"{client.url} is not an SGLang server; give --inference.url the address of one, without a path")


@asynccontextmanager
async def paused(client: PlainClient) -> AsyncIterator[None]:
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


# --- weights over torch.distributed -----------------------------------------------------------------------------------


async def group_ranks(client: PlainClient) -> int:
    """The number of ranks of this server: one per worker. Raises ConfigError, HTTPFailure."""
    info = await server_info(client)
    if info.dp_size != 1 or info.pp_size != 1:
        only = "--inference.transport distributed needs 1 for both; start one server for each replica"
        raise ConfigError(f"{client.url} runs with --dp-size {info.dp_size} --pp-size {info.pp_size}; {only}")
    return info.tp_size


async def join_group(client: PlainClient, place: GroupPlace, *, rank: int = 1) -> None:
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
    client: PlainClient,
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


async def leave_group(client: PlainClient, *, name: str) -> None:
    """Leave the group, if the server is in it. Raises HTTPFailure."""
    try:
        await _post(client, "/destroy_weights_update_group", {"group_name": name})
    except HTTPFailure as failure:
        if failure.status != 400:
            raise


async def _begin(client: PlainClient) -> None:
    """Begin an update. If an earlier update is still open, end it first. Raises HTTPFailure."""
    try:
        await _post(client, "/begin_weight_update", {})
    except HTTPFailure as failure:
        if "already open" not in str(failure):
            raise
        await _post(client, "/end_weight_update", {})
        await _post(client, "/begin_weight_update", {})


async def _post(client: PlainClient, path: str, body: object, *, timeout_seconds: float | None = None) -> None:
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
