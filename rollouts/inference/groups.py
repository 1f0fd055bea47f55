"""Weights over torch.distributed: what a server is asked while the trainer broadcasts.

The trainer is rank 0 of a process group that lives for one update; each worker of a server is one of the ranks after
it. An engine that takes weights so has `weights_as = "group"`, and its updates bring a manifest: what is broadcast, in
that order. Left out: the trainer's end (`rollouts.training.weight_groups`), and how a server is told (`sglang_group`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["GroupCalls", "GroupPlace", "TakesGroup"]


class GroupPlace(NamedTuple):
    """Where a group meets: the store of rank 0 listens at `address` and `port`; `backend` is gloo or nccl."""

    address: str
    port: int
    world_size: int
    name: str
    backend: str


class GroupCalls(NamedTuple):
    """One kind of server's calls (`sglang_group`): `ranks` (how many it takes), `join`, `receive` and `leave`."""

    ranks: Callable[..., Awaitable[int]]
    join: Callable[..., Awaitable[None]]
    receive: Callable[..., Awaitable[None]]
    leave: Callable[..., Awaitable[None]]


@runtime_checkable
class TakesGroup(Protocol):
    """An engine, or a server of a pool, that takes weights over a group."""

    url: str

    async def group_ranks(self) -> int:
        """How many ranks it is."""
        ...

    async def join_group(self, place: GroupPlace, rank: int, receiving: Callable[[], None]) -> None:
        """Join as `rank` and those after it; returns once all ranks have. The next `update_weights` receives, and
        calls `receiving` when it is about to. Raises InferenceError.
        """
        ...

    async def leave_group(self) -> None:
        """Leave it; harmless where it is in none. Raises InferenceError."""
        ...
