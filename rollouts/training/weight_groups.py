"""Full weights over torch.distributed, the trainer's end: rank 0 of a process group that lives for one update.

The group stands beside torch's default one (whose ranks shard the model, perhaps) and knows nothing of it. It meets at
a store that this process keeps, on the address by which the servers reach it, and for servers on this machine on
loopback only. Tensors are broadcast in the manifest's order, gloo between CPUs, NCCL between GPUs, in a thread that is
left behind where a server never answers. A new group for each update: servers may have come or gone in between. Left
out: what a server is told (`inference.groups`), and whether the weights have arrived (`weight_sync`).
"""

from __future__ import annotations

import functools
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import trio

from rollouts.errors import InferenceError
from rollouts.inference.base import InferenceBackend, WeightUpdate, members_of
from rollouts.inference.groups import GroupPlace, TakesGroup

__all__ = ["send_over_group"]

JOIN_SECONDS = 120.0
SEND_SECONDS = 600.0
LEAVE_SECONDS = 30.0
LOOK_SECONDS = 1.0  # how often it is seen whether one that is waited for is still there


class _Store(NamedTuple):
    """The store of torch's that ranks meet at, and its port."""

    store: Any
    port: int


async def send_over_group(
    engines: Sequence[InferenceBackend],
    update: WeightUpdate,
    tensors: Mapping[str, Any],
    *,
    device: str = "cpu",
    join_seconds: float = JOIN_SECONDS,
    send_seconds: float | None = None,
) -> None:
    """Give all these engines the tensors of `update.manifest`, at once. With a `device` of cuda they go over NCCL.
    `send_seconds` None: as long as the most patient of them says that loading may take (`load_seconds`).

    Raises InferenceError; the engines' weights are neither the old nor the new ones then.
    """
    members = [member for engine in engines for member in members_of(engine)]
    takers = [member for member in members if isinstance(member, TakesGroup)]
    if len(takers) < len(members) or not takers:
        raise InferenceError(
            f"{engines[0]!r} takes no weights over torch.distributed, or none of its servers is there; type "
            "--inference.transport disk",
            is_transient=False,
        )
    patience = max(getattr(member, "load_seconds", SEND_SECONDS) for member in takers)
    seconds = patience if send_seconds is None else send_seconds
    ranks = [await member.group_ranks() for member in takers]
    world_size = 1 + sum(ranks)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    address = _own_address([member.url for member in takers])
    store = await trio.to_thread.run_sync(_open_store, address, world_size, join_seconds)
    name = f"rollouts-{update.version}-{secrets.token_hex(4)}"
    place = GroupPlace(address, store.port, world_size, name, backend)
    received = [trio.Event() for _ in takers]
    group: Any = None

    async def join() -> None:
        nonlocal group
        group = await _in_thread(_join, store.store, place, device, join_seconds, seconds, seconds=join_seconds)

    async def broadcast() -> None:
        for member, event in zip(takers, received, strict=True):
            while not event.is_set():  # it may have to finish what it works on
                with trio.move_on_after(LOOK_SECONDS):
                    await event.wait()
                if not event.is_set() and not any(member in members_of(engine) for engine in engines):
                    raise InferenceError(f"{member!r} went away before it received version {update.version}")
        ordered = [tensors[info.name] for info in update.manifest]
        await _in_thread(_broadcast, group, ordered, device, seconds, seconds=seconds)

    joins = [
        functools.partial(member.join_group, place, 1 + sum(ranks[:index]), received[index].set)
        for index, member in enumerate(takers)
    ]
    try:
        await _together([join, *joins], f"no group for the weights of version {update.version} came about")
        updates = [functools.partial(engine.update_weights, update) for engine in engines]
        await _together([*updates, broadcast], f"the weights of version {update.version} were not broadcast")
    finally:
        with trio.move_on_after(LEAVE_SECONDS, shield=True):
            await _leave(takers)


async def _together(tasks: Sequence[Callable[[], Awaitable[None]]], what: str) -> None:
    """Run all of them; the first that fails ends the others. Raises InferenceError."""
    failed: list[Exception] = []

    async def run(task: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
        try:
            await task()
        except Exception as error:  # raised again below: alone, not in a group
            failed.append(error)
            scope.cancel()

    async with trio.open_nursery() as nursery:
        for task in tasks:
            nursery.start_soon(run, task, nursery.cancel_scope)
    if not failed:
        return
    # A rank that leaves is an error for the others too: what a server says of itself says more.
    told = next((each for each in failed if isinstance(each, InferenceError)), failed[0])
    if isinstance(told, RuntimeError | OSError | TimeoutError | trio.TooSlowError):  # torch has no errors of its own
        words = (str(told).strip().splitlines() or ["it took too long"])[0]
        raise InferenceError(f"{what}: {words}; see the servers' logs", is_transient=False) from told
    raise told


async def _leave(takers: Sequence[TakesGroup]) -> None:
    for member in takers:
        try:
            await member.leave_group()
        except InferenceError:
            continue  # it may be dead, which is told elsewhere; a group of its own name harms nobody


async def _in_thread(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """As `trio.to_thread.run_sync`, with a deadline after which the thread is left behind. Raises TooSlowError."""
    with trio.fail_after(seconds + 5.0):  # torch's own deadline comes first, and says more
        return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)


def _own_address(urls: Sequence[str]) -> str:
    """The address of this machine by which the servers reach it: loopback where all of them are here."""
    hosts = [urlsplit(url).hostname or "127.0.0.1" for url in urls]
    far = next((host for host in hosts if host not in ("127.0.0.1", "localhost", "::1")), None)
    if far is None:
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))  # nothing is sent: the kernel only chooses the way
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InferenceError(f"{far} cannot be reached from here: {error.strerror or error}") from error


# --- torch, in a thread -----------------------------------------------------------------------------------------------


def _open_store(address: str, world_size: int, seconds: float) -> _Store:
    import torch

    distributed: Any = torch.distributed  # its stubs name few of its classes
    listener = socket.create_server((address, 0))  # this address only, and whatever port is free
    port = int(listener.getsockname()[1])
    store = distributed.TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return _Store(store, port)


def _join(store: Any, place: GroupPlace, device: str, seconds: float, send_seconds: float) -> Any:
    """Rank 0 of the group; waits for all. Servers join by torch's own helper, which puts these prefixes before keys."""
    import torch

    distributed: Any = torch.distributed
    kind = "cuda" if place.backend == "nccl" else "cpu"
    inner = distributed.PrefixStore(f"{place.name}/", distributed.PrefixStore(place.name, store))
    prefixed = distributed.PrefixStore(f"{kind}/", inner)
    timeout = timedelta(seconds=seconds)
    if kind == "cpu":
        return distributed.ProcessGroupGloo(prefixed, 0, place.world_size, timeout)
    torch.cuda.set_device(device)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds + send_seconds)  # of each broadcast too
    return distributed.ProcessGroupNCCL(prefixed, 0, place.world_size, options)


def _broadcast(group: Any, tensors: Sequence[Any], device: str, seconds: float) -> None:
    import torch

    distributed: Any = torch.distributed
    is_cuda = device.startswith("cuda")
    if is_cuda:
        torch.cuda.set_device(device)
    options = distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=seconds)
    for tensor in tensors:
        group.broadcast([tensor.detach().contiguous().to(device)], options).wait()
    if is_cuda:
        torch.cuda.synchronize(device)
