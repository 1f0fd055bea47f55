"""Weights to SGLang over torch.distributed: the calls that a server needs while the trainer broadcasts.

The trainer is rank 0; a server's workers (`group_ranks`) are ranks after it. Seen to work, with gloo on CPUs:

    store = TCPStore(address, port, world_size, is_master=True, wait_for_workers=False)            # rank 0, first
    await join_group(...)   beside   group = ProcessGroupGloo(prefixed, 0, world_size, timeout)    # each waits
    await nursery.start(receive, ...), then group.broadcast([tensor], options).wait() for each of `infos`, in order
    await leave_group(...)

A server makes its group with torch's `_new_process_group_helper`, whose keys stand in the store under prefixes; a group
of one's own meets it with `prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))` ("cuda/"
for NCCL, from torch's source). The store may listen on loopback alone (`master_listen_fd`). torch was 2.13 at both
ends. A name can be used again after `leave_group`.

Not seen by a server: a tensor that the model does not have is taken and dropped, one that is missing stays the old one.
Seen: another shape (400; what came before it is loaded), a trainer that dies (400 at once, with gloo). A trainer that
sends nothing is waited for as long as torch does, half an hour. Left out: the trainer's end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import trio

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import TensorInfo
from rollouts.inference.http.client import HTTPClient
from rollouts.inference.http.failures import HTTPFailure
from rollouts.inference.sglang_wire import Paused, server_info

__all__ = ["group_ranks", "join_group", "leave_group", "receive"]

BUCKET_BYTES = 2**30  # a server holds what it has received beside its weights until it has loaded it
BYTES_OF = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


async def group_ranks(client: HTTPClient) -> int:
    """How many ranks of a group this server takes: one for each of its workers. Raises ConfigError, HTTPFailure."""
    info = await server_info(client)
    if info.dp_size != 1 or info.pp_size != 1:
        raise ConfigError(
            f"{client.url} runs with --dp-size {info.dp_size} --pp-size {info.pp_size}; SGLang receives weights with 1 "
            "and 1 only: start one server for each replica"
        )
    return info.tp_size


async def join_group(
    client: HTTPClient,
    *,
    address: str,
    port: int,
    world_size: int,
    name: str,
    backend: str,
    rank: int = 1,
    timeout_seconds: float = 120.0,
) -> None:
    """Take part in the group `name`, as `rank` and those after it (`group_ranks` of them) of `world_size`.

    The store of rank 0 listens at `address` and `port`; `backend` is gloo or nccl. Returns when all ranks have joined,
    so rank 0 has to join meanwhile. Raises InferenceError.
    """
    body = {
        "master_address": address,
        "master_port": port,
        "rank_offset": rank,
        "world_size": world_size,
        "group_name": name,
        "backend": backend,
    }
    try:
        await client.post("/init_weights_update_group", body, bytes, timeout_seconds=timeout_seconds, attempts_max=1)
    except HTTPFailure as failure:
        raise InferenceError(
            f"{client.url} did not join the group {name!r} at {address}:{port}: {failure}; can it reach that address, "
            "and is its torch of the trainer's version?",
            is_transient=False,
        ) from failure


async def receive(
    client: HTTPClient,
    infos: Sequence[TensorInfo],
    version: int,
    *,
    name: str,
    timeout_seconds: float = 600.0,
    bucket_bytes: int = BUCKET_BYTES,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Take these tensors from rank 0 of the group `name`, which broadcasts them in this order, and serve them as
    `version`, with no cache of the old ones. Replies under way go on with them afterwards.

    `task_status.started()` is called when the server is about to receive: a trainer that broadcasts only then is not
    left alone by a server that refuses. Tensors are loaded `bucket_bytes` at a time. Raises InferenceError; the
    server's weights are neither the old nor the new ones then.
    """
    assert infos, f"no tensors of version {version}"
    buckets = list(_buckets(infos, bucket_bytes))
    try:
        async with Paused(client, timeout_seconds):
            await _begin(client, timeout_seconds)
            task_status.started()
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
                await _tell(client, "/update_weights_from_distributed", body, timeout_seconds)
            await _tell(client, "/end_weight_update", {}, timeout_seconds)
    except HTTPFailure as failure:
        raise InferenceError(
            f"{client.url} did not take the weights of version {version} out of the group {name!r}: {failure}; its "
            "weights are neither the old nor the new ones now: start it again",
            is_transient=False,
        ) from failure


async def leave_group(client: HTTPClient, *, name: str, timeout_seconds: float = 60.0) -> None:
    """Leave the group; harmless where it is not in it. Raises HTTPFailure."""
    try:
        await _tell(client, "/destroy_weights_update_group", {"group_name": name}, timeout_seconds)
    except HTTPFailure as failure:
        if failure.status != 400:
            raise


async def _begin(client: HTTPClient, timeout_seconds: float) -> None:
    """Open an update; one that was left open is closed first. Raises HTTPFailure."""
    try:
        await _tell(client, "/begin_weight_update", {}, timeout_seconds)
    except HTTPFailure as failure:
        if "already open" not in str(failure):
            raise
        await _tell(client, "/end_weight_update", {}, timeout_seconds)
        await _tell(client, "/begin_weight_update", {}, timeout_seconds)


async def _tell(client: HTTPClient, path: str, body: object, timeout_seconds: float) -> None:
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
