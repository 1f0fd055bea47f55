"""Messages between ranks through torch's key-value store: any size, each read once.

A store holds values of some megabytes at most, so that longer ones go in pieces. Left out: what is said (`crew`).
"""

from __future__ import annotations

import datetime
from typing import Any

__all__ = ["Channel", "is_timeout"]

# libuv's server refuses payloads of 8 MiB.
_PIECE_BYTES = 4 << 20


class Channel:
    """One rank's way to the store. Not for two threads at once: give each a `clone`."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def clone(self) -> Channel:
        """Another connection to the same store."""
        return Channel(self._store.clone())

    def send(self, key: str, data: bytes) -> None:
        """Leave a message under a key that was never used."""
        pieces = range(0, max(1, len(data)), _PIECE_BYTES)
        for number, start in enumerate(pieces):
            self._store.set(f"{key}/{number}", data[start : start + _PIECE_BYTES])
        self._store.set(key, str(len(pieces)))

    def is_there(self, key: str) -> bool:
        """Whether a message waits under this key."""
        found: bool = self._store.check([key])
        return found

    def receive(self, key: str, timeout_seconds: float) -> bytes:
        """Wait for the message, take it, and remove it. Raises what the store raises: see `is_timeout`."""
        self._store.wait([key], datetime.timedelta(seconds=timeout_seconds))
        names = [f"{key}/{number}" for number in range(int(self._store.get(key)))]
        data = b"".join(self._store.get(name) for name in names)
        for name in (key, *names):
            self._store.delete_key(name)
        return data

    def post(self, key: str, data: bytes) -> None:
        """Write a short notice, over an older one."""
        self._store.set(key, data)

    def read(self, key: str) -> bytes | None:
        """The notice, which stays; None where there is none."""
        found: bytes | None = self._store.get(key) if self._store.check([key]) else None
        return found


def is_timeout(error: Exception) -> bool:
    """Whether the store raised this because nothing came in time, and not because it is gone."""
    from torch.distributed import DistStoreError

    return isinstance(error, DistStoreError) and "imeout" in str(error)
