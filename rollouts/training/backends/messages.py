"""Messages between ranks through torch's key-value store: any size, each read once, all of them signed.

A store holds values of some megabytes at most, so that longer ones go in pieces. torch's store has no authentication:
anything that can connect may read and write. So every message carries an HMAC under the secret of the run, and a
message that is not signed is not obeyed. Nothing is encrypted, and nothing stops a stranger from deleting. Left out:
what is said (`crew`), and where the store listens (`meeting`).
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
from typing import Any

from rollouts.errors import RankError

__all__ = ["Channel", "is_timeout"]

# libuv's server refuses payloads of 8 MiB.
_PIECE_BYTES = 4 << 20
_TAG_BYTES = hashlib.sha256().digest_size


class Channel:
    """One rank's way to the store. Not for two threads at once: give each a `clone`. `run` is part of what is signed,
    so that a message of one run says nothing in another one.
    """

    def __init__(self, store: Any, secret: bytes, run: str = "") -> None:
        self._store = store
        self._secret = secret
        self._run = run

    def clone(self) -> Channel:
        """Another connection to the same store."""
        return Channel(self._store.clone(), self._secret, self._run)

    def group_store(self) -> Any:
        """Where torch makes a process group of the ranks; torch signs nothing."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore("group", self._store)

    def send(self, key: str, data: bytes) -> None:
        """Leave a message under a key that was never used."""
        pieces = range(0, max(1, len(data)), _PIECE_BYTES)
        for number, start in enumerate(pieces):
            self._store.set(f"{key}/{number}", data[start : start + _PIECE_BYTES])
        self.post(key, len(pieces).to_bytes(4, "big") + hashlib.sha256(data).digest())

    def is_there(self, key: str) -> bool:
        """Whether a message, signed or not, waits under this key."""
        found: bool = self._store.check([key])
        return found

    def receive(self, key: str, timeout_seconds: float) -> bytes:
        """Wait for the message, take it, and remove it. Raises RankError for one that this run did not sign, and what
        the store raises: see `is_timeout`.
        """
        self._store.wait([key], datetime.timedelta(seconds=timeout_seconds))
        head = self._verified(key, self._store.get(key))
        if head is None:
            raise _unsigned(key)
        names = [f"{key}/{number}" for number in range(int.from_bytes(head[:4], "big"))]
        data = b"".join(self._store.get(name) for name in names)
        if not hmac.compare_digest(head[4:], hashlib.sha256(data).digest()):
            raise _unsigned(key)
        for name in (key, *names):
            self._store.delete_key(name)
        return data

    def post(self, key: str, data: bytes) -> None:
        """Write a short notice, over an older one."""
        self._store.set(key, self._tag(key, data) + data)

    def read(self, key: str) -> bytes | None:
        """The notice, which stays; None where there is none that this run signed."""
        return self._verified(key, self._store.get(key)) if self._store.check([key]) else None

    def _tag(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, f"{self._run}\0{key}\0".encode() + data, "sha256")

    def _verified(self, key: str, value: bytes) -> bytes | None:
        tag, data = value[:_TAG_BYTES], value[_TAG_BYTES:]
        return data if hmac.compare_digest(tag, self._tag(key, data)) else None


def is_timeout(error: Exception) -> bool:
    """Whether the store raised this because nothing came in time, and not because it is gone."""
    from torch.distributed import DistStoreError

    return isinstance(error, DistStoreError) and "imeout" in str(error)


def _unsigned(key: str) -> RankError:
    return RankError(
        f"the message {key} in the ranks' store is not signed with the secret of this run: something else writes "
        "there; let nothing but the ranks reach MASTER_ADDR and MASTER_PORT"
    )
