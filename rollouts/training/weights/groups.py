"""Full weights over torch.distributed, the trainer's end: rank 0 of a process group that lives for one update.

The group is beside torch's default one (whose ranks shard the model, perhaps) and knows nothing of it. It meets at
a store that this process keeps, on the address by which the servers reach it, and for servers on this machine on
loopback only. Tensors are broadcast in the manifest's order, gloo between CPUs, NCCL between GPUs, in a thread that is
left behind where a server never answers. A new group for each update: servers may have come or gone in between. Left
out: what a server is asked (`inference.servers.sglang_wire`), and whether the weights have arrived (`sync`).
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import trio

from rollouts.errors import InferenceError
from rollouts.inference.base import InferenceBackend, WeightUpdate, members_of
from rollouts.inference.servers.dialect import GroupPlace, TakesGroup

JOIN_SECONDS = 120.0
LEAVE_SECONDS = 30.0
LOOK_SECONDS = 1.0  # how often it is seen whether one that is waited for is still there


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
        what = f"{engines[0]!r} takes no weights over torch.distributed, or none of its servers is there"
        raise InferenceError(f"{what}; type --inference.transport disk", is_transient=False)
    seconds = send_seconds or max(member.capabilities.load_seconds for member in takers)
    ranks = [await member.group_ranks() for member in takers]
    world_size = 1 + sum(ranks)
    address = _own_address([member.url for member in takers])
    store = await trio.to_thread.run_sync(_open_store, address, world_size, join_seconds)
    name = f"rollouts-{update.version}-{secrets.token_hex(4)}"
    place = GroupPlace(address, store.port, world_size, name, "nccl" if device.startswith("cuda") else "gloo")
    received = [trio.Event() for _ in takers]
    group: Any = None

    async def join() -> None:
        nonlocal group
        group = await _in_thread(_join, store, place, device, join_seconds, seconds, seconds=join_seconds)

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
            for member in takers:
                # It may be dead, which others say; a group of its own name harms nobody.
                with contextlib.suppress(InferenceError):
                    await member.leave_group()


async def _together(tasks: Sequence[Callable[[], Awaitable[None]]], what: str) -> None:
    """Run all of them; the first that fails ends the others. Raises InferenceError."""
    failed: list[Exception] = []

    async def run(task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except Exception as error:  # raised again below: alone, not in a group
            failed.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for task in tasks:
            nursery.start_soon(run, task)
    if not failed:
        return
    # A rank that leaves is an error for the others too: what a server says of itself says more.
    first = next((each for each in failed if isinstance(each, InferenceError)), failed[0])
    if isinstance(first, RuntimeError | OSError | TimeoutError | trio.TooSlowError):  # torch has no errors of its own
        words = (str(first).strip().splitlines() or ["it took too long"])[0]
        raise InferenceError(f"{what}: {words}; see the servers' logs", is_transient=False) from first
    raise first


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


def _open_store(address: str, world_size: int, seconds: float) -> Any:
    """torch's store at which the ranks meet; `port` is its."""
    import torch

    distributed: Any = torch.distributed  # its stubs name few of its classes
    listener = socket.create_server((address, 0))  # this address only, and whatever port is free
    port, timeout = listener.getsockname()[1], timedelta(seconds=seconds)
    settings = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return distributed.TCPStore(address, port, world_size, timeout=timeout, **settings)


def _join(store: Any, place: GroupPlace, device: str, seconds: float, send_seconds: float) -> Any:
    """Rank 0 of the group; waits for all. Servers join by torch's own helper, which puts these prefixes before keys."""
    import torch

    distributed: Any = torch.distributed
    is_cuda = place.backend == "nccl"
    for prefix in (place.name, f"{place.name}/", "cuda/" if is_cuda else "cpu/"):
        store = distributed.PrefixStore(prefix, store)
    if not is_cuda:
        return distributed.ProcessGroupGloo(store, 0, place.world_size, timedelta(seconds=seconds))
    torch.cuda.set_device(device)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds + send_seconds)  # of each broadcast too
    return distributed.ProcessGroupNCCL(store, 0, place.world_size, options)


def _broadcast(group: Any, tensors: Sequence[Any], device: str, seconds: float) -> None:
    import torch

    distributed: Any = torch.distributed
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    options = distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=seconds)
    for tensor in tensors:
        group.broadcast([tensor.detach().contiguous().to(device)], options).wait()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
