"""What SGLang's servers are asked and answer (`sglang`): shapes, one request, a pause, and weights over
torch.distributed. Fields that are not read are left out of the replies: msgspec skips them.

The trainer is rank 0; a server's workers (`group_ranks`) are ranks after it. Seen to work, with gloo on CPUs:

    store = TCPStore(address, port, world_size, is_master=True, wait_for_workers=False)            # rank 0, first
    await join_group(...)   beside   group = ProcessGroupGloo(prefixed, 0, world_size, timeout)    # each waits
    receive(...) beside group.broadcast([tensor], options).wait() for each of `infos`, in order
    await leave_group(...)

A server makes its group with torch's `_new_process_group_helper`, whose keys stand in the store under prefixes; a group
of one's own meets it with `prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))` ("cuda/"
for NCCL, from torch's source). The store may listen on loopback alone (`master_listen_fd`). torch was 2.13 at both
ends. A name can be used again after `leave_group`.

Not seen by a server: a tensor that the model does not have is taken and dropped, one that is missing stays the old one.
Seen: another shape (400; what came before it is loaded), a trainer that dies (400 at once, with gloo). A trainer that
sends nothing is waited for as long as torch does, half an hour. The trainer's end is
`rollouts.training.weights.groups`.
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
GO_ON_SECONDS = 60.0
JOIN_SECONDS = 120.0
NEITHER = "its weights are neither the old nor the new ones now: start it again"
BUCKET_BYTES = 2**30  # a server holds what it has received beside its weights until it has loaded it
BYTES_OF = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}

# What a 400 says that another server can do, or this one with its weights given again.
_RETRYABLE_WORDS = ("Duplicate request ID", "never been loaded", "Failed to implicitly load LoRA")

Logprob = tuple[float | None, int, Any]
"""Its value, the id, and the text or null."""


class Sampling(msgspec.Struct, frozen=True):
    """How one request is sampled. All that shapes the distribution is said, since a server may have defaults of its
    own (--preferred-sampling-params); an unknown key is a 400.
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
    """One request: ids [L] in. `extra_key` sets caches apart."""

    rid: str
    input_ids: list[int]
    sampling_params: Sampling
    lora_path: str | None = None
    extra_key: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0


class Finish(msgspec.Struct, frozen=True):
    """Why a reply ended. It has a status where the abort was not asked for."""

    type: str
    message: str = ""
    status_code: int | None = None


class Span(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, end) are of the weights of this name."""

    version: str
    start: int = 0
    end: int = 0


class Meta(msgspec.Struct, frozen=True):
    """What comes with the ids."""

    finish_reason: Finish
    weight_version: str = ""  # when the request came in
    weight_versions: list[Span] = []
    output_token_logprobs: list[Logprob] = []
    input_token_logprobs: list[Logprob] = []
    output_top_logprobs: list[list[Logprob] | None] = []


class Reply(msgspec.Struct, frozen=True):
    """The answer to one request: ids [K] out."""

    output_ids: list[int]
    meta_info: Meta


class ServedInfo(msgspec.Struct, frozen=True):
    """What a server was started with; /model_info has what was set since (its name is the path of the last
    reload then).
    """

    version: str
    served_model_name: str
    max_req_input_len: int | None = None
    enable_lora: bool | None = False
    max_lora_rank: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1


def rid_of(name: str) -> str:
    """An abort takes all names that begin as the one that it was given: none of ours begins as another one."""
    return f"{name}."


def body_of(target: RequestTarget, tokens: list[int], sampling: Sampling, logprob_start_len: int = -1) -> GenerateBody:
    """A request as it is sent."""
    is_adapter = target.model.startswith(ADAPTER_PREFIX)
    return GenerateBody(
        rid_of(target.name),
        tokens,
        sampling,
        lora_path=target.model if is_adapter else None,  # the base model's name would be an unknown adapter's
        extra_key=target.salt or None,
        return_logprob=True,
        logprob_start_len=logprob_start_len,
    )


async def generate(client: HTTPClient, body: GenerateBody) -> Reply:
    """Raises HTTPFailure; retryable also where the server no longer has the weights that are to answer."""
    try:
        reply = await client.post("/generate", body, Reply)
    except HTTPFailure as failure:
        if failure.status == 400 and any(words in str(failure) for words in _RETRYABLE_WORDS):
            raise HTTPFailure("server", str(failure), retryable=True, status=400) from failure
        raise
    _check_weights(client.url, body, reply.meta_info)
    return reply


def _check_weights(url: str, body: GenerateBody, meta: Meta) -> None:
    """Raises HTTPFailure where older weights answered than those the request was sent to."""
    expected = (body.extra_key or "").rpartition("-")[2]  # `Server` ends a salt with its version
    # Version 0 is what a server may have been started with; an adapter's version is in its name.
    if body.lora_path is not None or not expected.isdecimal() or expected == "0":
        return
    served = {span.version for span in meta.weight_versions} or {meta.weight_version}
    # Later ones came while the request was under way.
    if any(not name.isdecimal() or int(name) < int(expected) for name in served):
        raise other_weights(url, ", ".join(sorted(served)), expected)


def read_logprobs(found: Sequence[Logprob], ids: Sequence[int], url: str) -> list[float]:
    """The logprobs [K] of these ids [K]. Raises InferenceError where they are of others, or are no numbers."""
    if [entry[1] for entry in found] != list(ids):
        raise InferenceError(f"{url} gave {len(ids)} token ids and logprobs of {len(found)}, or of other tokens")
    logprobs = []
    for value, token, _ in found:
        if value is None or not math.isfinite(value):
            raise InferenceError(f"{url} gave no finite logprob for token {token}: {value}")
        logprobs.append(min(value, 0.0))  # rounding may put a sure token above 0
    return logprobs


async def server_info(client: PlainClient) -> ServedInfo:
    """What it says of itself. Its answer holds its API key: it is never shown. Raises ConfigError, HTTPFailure."""
    for path in ("/server_info", "/get_server_info"):
        try:
            return await client.get(path, ServedInfo)
        except HTTPFailure as failure:
            if failure.status != 404 and failure.kind != "garbage":
                raise
    raise ConfigError(
        f"what answers at {client.url} is no SGLang server; give --inference.url the address of one, without a path"
    )


@asynccontextmanager
async def paused(client: PlainClient) -> AsyncIterator[None]:
    """Within this block the server computes nothing. Replies under way wait: when it goes on, whatever has happened,
    their keys and values are computed anew, with the weights that are served then.
    """
    go_on = partial(client.post, "/continue_generation", {}, bytes, timeout_seconds=GO_ON_SECONDS)
    try:
        await client.post("/pause_generation", {"mode": "retract"}, bytes)
        yield
    except BaseException:  # it may have paused even where that failed
        with trio.CancelScope(shield=True), suppress(HTTPFailure):  # what went wrong before says more
            await go_on()
        raise
    with trio.CancelScope(shield=True):
        await go_on()


# --- weights over torch.distributed -----------------------------------------------------------------------------------


async def group_ranks(client: PlainClient) -> int:
    """How many ranks of a group this server takes: one for each of its workers. Raises ConfigError, HTTPFailure."""
    info = await server_info(client)
    if info.dp_size != 1 or info.pp_size != 1:
        only = "SGLang receives weights with 1 and 1 only: start one server for each replica"
        raise ConfigError(f"{client.url} runs with --dp-size {info.dp_size} --pp-size {info.pp_size}; {only}")
    return info.tp_size


async def join_group(client: PlainClient, place: GroupPlace, *, rank: int = 1) -> None:
    """Take part in the group, as `rank` and those after it (`group_ranks` of them). Returns when all ranks have joined,
    so rank 0 has to join meanwhile. Raises InferenceError.
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
        where, advice = f"{place.address}:{place.port}", "can it reach that, and is its torch of the trainer's version?"
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
    """Take these tensors from rank 0 of the group `name`, which broadcasts them in this order, and serve them as
    `version`, with no cache of the old ones. Replies under way go on with them afterwards.

    `receiving` is called when the server is about to receive: a trainer that broadcasts only then is not left alone by
    a server that refuses. Tensors are loaded `bucket_bytes` at a time. Raises InferenceError; the
    server's weights are neither the old nor the new ones then.
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
        words = f"{client.url} did not take the weights of version {version} out of the group {name!r}: {failure}"
        raise InferenceError(f"{words}; {NEITHER}", is_transient=False) from failure


async def leave_group(client: PlainClient, *, name: str) -> None:
    """Leave the group; harmless where it is not in it. Raises HTTPFailure."""
    try:
        await _post(client, "/destroy_weights_update_group", {"group_name": name})
    except HTTPFailure as failure:
        if failure.status != 400:
            raise


async def _begin(client: PlainClient) -> None:
    """Open an update; one that was left open is closed first. Raises HTTPFailure."""
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
    """In their order, each of `bytes_max` at most, or one tensor."""
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
