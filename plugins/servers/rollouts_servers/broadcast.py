"""Sends full weights over torch.distributed. This is rank 0 of a process group, which exists for one update.

The group is independent of torch's default group, in which ranks may shard the model. Its members meet at a store of
this process, at the address by which the servers reach this machine: loopback if all servers are on it. Tensors are
broadcast in the order of the manifest, with gloo between CPUs and NCCL between GPUs. If a server does not answer in
time, the broadcast's thread is abandoned, and the update fails. Each update has a new group, because servers may come
and go. Not here: requests to servers (`sglang`), and whether the weights have arrived (`training.weights.sync`).
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
from rollouts_servers.dialect import GroupPlace, TakesGroup

JOIN_SECONDS = 120.0
LEAVE_SECONDS = 30.0
LOOK_SECONDS = 1.0  # how often to check that servers are still alive


async def send_over_group(
    engines: Sequence[InferenceBackend], update: WeightUpdate, tensors: Mapping[str, Any], *, device: str = "cpu"
) -> None:
    """Send the tensors of `update.manifest` to all these engines at once: with NCCL if `device` is a GPU, else with
    gloo.

    Sending has the longest `load_seconds` of the engines. Raises InferenceError; the engines' weights are then
    undefined.
    """
    members = [member for engine in engines for member in members_of(engine)]
    takers = [member for member in members if isinstance(member, TakesGroup)]
    if len(takers) < len(members) or not takers:
        what = f"{engines[0]!r} takes no weights over torch.distributed, or none of its servers is there"
        raise InferenceError(f"{what}; type --inference.transport disk", is_transient=False)
    seconds = max(member.capabilities.load_seconds for member in takers)
    ranks = [await member.group_ranks() for member in takers]
    world_size = 1 + sum(ranks)
    address = _own_address([member.url for member in takers])
    store = await trio.to_thread.run_sync(_open_store, address, world_size, JOIN_SECONDS)
    name = f"rollouts-{update.version}-{secrets.token_hex(4)}"
    place = GroupPlace(address, store.port, world_size, name, "nccl" if device.startswith("cuda") else "gloo")
    received = [trio.Event() for _ in takers]
    group: Any = None

    async def join() -> None:
        nonlocal group
        group = await _in_thread(_join, store, place, device, seconds, seconds=JOIN_SECONDS)

    async def broadcast() -> None:
        for member, event in zip(takers, received, strict=True):
            while not event.is_set():  # the server may have to finish other work
                with trio.move_on_after(LOOK_SECONDS):
                    await event.wait()
                if not event.is_set() and not any(member in members_of(engine) for engine in engines):
                    raise InferenceError(f"{member!r} went away before it received version {update.version}")
        ordered = [tensors[info.name] for info in update.manifest]
        await _in_thread(_broadcast, group, ordered, device, seconds, seconds=seconds)

    firsts = [1 + sum(ranks[:index]) for index in range(len(takers))]
    each_one = zip(takers, firsts, received, strict=True)
    joins = [functools.partial(member.join_group, place, first, event.set) for member, first, event in each_one]
    try:
        await _together([join, *joins], f"no group for the weights of version {update.version} came about")
        updates = [functools.partial(engine.update_weights, update) for engine in engines]
        await _together([*updates, broadcast], f"the weights of version {update.version} were not broadcast")
    finally:
        with trio.move_on_after(LEAVE_SECONDS, shield=True):
            for member in takers:
                # If the server is dead, other checks report it. An abandoned group has a unique name, so it does no
                # harm.
                with contextlib.suppress(InferenceError):
                    await member.leave_group()


async def _together(tasks: Sequence[Callable[[], Awaitable[None]]], what: str) -> None:
    """Run all of them. The first failure cancels the others. Raises InferenceError."""
    failed: list[Exception] = []

    async def run(task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except Exception as error:  # raised below, outside the exception group
            failed.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for task in tasks:
            nursery.start_soon(run, task)
    if not failed:
        return
    # If a rank leaves, all others fail too. A server's own error is the most helpful.
    first = next((each for each in failed if isinstance(each, InferenceError)), failed[0])
    if isinstance(first, RuntimeError | OSError | TimeoutError | trio.TooSlowError):  # torch has no class of its own
        words = (str(first).strip().splitlines() or ["it took too long"])[0]
        raise InferenceError(f"{what}: {words}; see the servers' logs", is_transient=False) from first
    raise first


async def _in_thread(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """Like `trio.to_thread.run_sync`, with a deadline, after which the thread is abandoned. Raises TooSlowError."""
    with trio.fail_after(seconds + 5.0):  # torch's own deadline is earlier, and its error is more helpful
        return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)


def _own_address(urls: Sequence[str]) -> str:
    """The address by which the servers reach this machine; loopback if all of them are on it."""
    hosts = [urlsplit(url).hostname or "127.0.0.1" for url in urls]
    far = next((host for host in hosts if host not in ("127.0.0.1", "localhost", "::1")), None)
    if far is None:
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))  # sends nothing; the kernel chooses a route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InferenceError(f"{far} cannot be reached from here: {error.strerror or error}") from error


# --- torch, in a thread -----------------------------------------------------------------------------------------------


def _open_store(address: str, world_size: int, seconds: float) -> Any:
    """The torch store at which the ranks meet, and its `port`."""
    import torch

    distributed: Any = torch.distributed  # its type stubs lack these classes
    listener = socket.create_server((address, 0))  # this address only, with a free port
    port, timeout = listener.getsockname()[1], timedelta(seconds=seconds)
    settings = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return distributed.TCPStore(address, port, world_size, timeout=timeout, **settings)


def _join(store: Any, place: GroupPlace, device: str, seconds: float) -> Any:
    """Join the group as rank 0, and wait for all. Servers join by a helper of torch, which uses these key prefixes."""
    import torch

    distributed: Any = torch.distributed
    is_cuda = place.backend == "nccl"
    for prefix in (place.name, f"{place.name}/", "cuda/" if is_cuda else "cpu/"):
        store = distributed.PrefixStore(prefix, store)
    if not is_cuda:
        return distributed.ProcessGroupGloo(store, 0, place.world_size, timedelta(seconds=JOIN_SECONDS))
    torch.cuda.set_device(device)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=JOIN_SECONDS + seconds)  # also applies to each broadcast
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
