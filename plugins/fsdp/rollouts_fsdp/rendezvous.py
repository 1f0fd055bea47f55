"""How ranks meet: a torch store, and signed messages in it.

If all ranks are on one machine, the store listens on loopback only. Ranks on several hosts meet at MASTER_ADDR and
MASTER_PORT, where anything on that network can connect; they need the same secret in their environment. torch's store
has no authentication: any client may read and write. So every message carries an HMAC with the secret of the run, and
unsigned messages are ignored or refused. Messages are not encrypted, and a stranger could delete them. The store only
accepts values of some megabytes, so longer messages are split.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.distributed import DistStoreError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from rollouts.errors import ConfigError, RankError

SECRET = "ROLLOUTS_RANKS_SECRET"
_LOOPBACK = "127.0.0.1"
_SECRET_LENGTH_MIN = 16
_TIMEOUT = datetime.timedelta(seconds=300)
# libuv's server refuses values of 8 MiB.
_PIECE_BYTES = 4 << 20
_TAG_BYTES = hashlib.sha256().digest_size


class RankPlace(NamedTuple):
    """Which of how many ranks this process is. `launched`: by torchrun or the like, or by rank 0."""

    rank: int
    world_size: int
    local_rank: int
    launched: bool


def place_of_this_process() -> RankPlace | None:
    """The place from RANK and WORLD_SIZE, which a launcher sets; None without a launcher.

    Raises ConfigError if only some of the variables are set, or if they are not numbers.
    """
    given = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    if not given["RANK"] and not given["WORLD_SIZE"]:
        return None
    try:
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        int(given["MASTER_PORT"])
        if not given["MASTER_ADDR"]:
            raise ValueError("MASTER_ADDR")
    except ValueError as error:
        shown = ", ".join(f"{name}={value or '(not set)'}" for name, value in given.items())
        raise ConfigError(
            f"this process was launched as a rank, but its variables are {shown}; start it with "
            "`torchrun --nproc-per-node N -m rollouts run …`, or type --training.processes N without a launcher"
        ) from error
    return RankPlace(rank, world_size, local_rank, "ROLLOUTS_STARTED_BY_RANK_0" not in os.environ)


def secret_of(place: RankPlace) -> bytes:
    """The secret of this rank's run. Empty if there is none and all ranks are on this machine.

    Raises ConfigError if it is missing or too short.
    """
    secret = os.environ.get(SECRET, "")
    make = f"type `export {SECRET}=$(openssl rand -hex 32)` on one host, and give all ranks the same value"
    if not secret and not _all_here(place):
        what = f"the {place.world_size} ranks are on several hosts, and {SECRET} is not set"
        raise ConfigError(f"{what}: commands to ranks are signed with it; {make}")
    if secret and len(secret) < _SECRET_LENGTH_MIN:
        raise ConfigError(f"{SECRET} has {len(secret)} characters: expected {_SECRET_LENGTH_MIN} or more; {make}")
    return secret.encode()


def open_here(world_size: int) -> tuple[RankChannel, dict[str, str]]:
    """Rank 0: open a store on loopback with a new secret. Also returns the variables for ranks that it starts."""
    store, port = _listen(world_size, 0)
    secret = secrets.token_hex(32)
    variables = {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(port), SECRET: secret} | _stay_on_loopback()
    return RankChannel(PrefixStore("rollouts/0", store), secret.encode(), "/0"), variables


def join_ranks(place: RankPlace) -> RankChannel:
    """The channel of rank 0, or of a rank that a launcher started. Raises ConfigError if the secret is missing."""
    secret, size, is_first = secret_of(place), place.world_size, place.rank == 0
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the launcher's store survives restarts of ranks
    launcher_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not _all_here(place):
        store = _connect(address, port, size, is_master=is_first and not launcher_has_store)
    else:
        _stay_on_loopback()
        if launcher_has_store:
            # The launcher's store listens on every interface, so it only gets the port of our store.
            shared = PrefixStore(f"rollouts/{attempt}", _connect(address, port, size))
            if is_first:
                store, port = _listen(size, 0)
                shared.set("port", str(port))
            else:
                store = _connect(_LOOPBACK, int(shared.get("port")), size)
        else:
            store = _listen(size, port)[0] if is_first else _connect(_LOOPBACK, port, size)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return RankChannel(PrefixStore(f"rollouts/{attempt}", store), secret, f"{run}/{attempt}")


def _all_here(place: RankPlace) -> bool:
    """Whether all ranks are on this machine, according to the launcher."""
    address = os.environ["MASTER_ADDR"]
    is_loopback = address in ("localhost", "::1") or address.startswith("127.")
    return is_loopback or os.environ.get("LOCAL_WORLD_SIZE") == str(place.world_size)


def _stay_on_loopback() -> dict[str, str]:
    """Make gloo listen on loopback, whatever the machine's name is. Returns the variable for other ranks."""
    name = "GLOO_SOCKET_IFNAME"
    loopback = next((each for _, each in socket.if_nameindex() if each in ("lo", "lo0")), None)
    return {} if loopback is None else {name: os.environ.setdefault(name, loopback)}


def _listen(world_size: int, port: int) -> tuple[Any, int]:
    """A store on loopback, and its port. Port 0: any free one."""
    try:
        listener = socket.create_server((_LOOPBACK, port))
    except OSError as error:
        raise ConfigError(f"MASTER_PORT {port} is taken ({error.strerror}); give the ranks another one") from error
    port = int(listener.getsockname()[1])
    return _connect(_LOOPBACK, port, world_size, is_master=True, master_listen_fd=listener.detach()), port


def _connect(address: str, port: int, world_size: int, *, is_master: bool = False, **settings: Any) -> Any:
    settings |= {"is_master": is_master, "wait_for_workers": False, "timeout": _TIMEOUT}
    return TCPStore(address, port, world_size, **settings)


@dataclass(frozen=True, eq=False)
class RankChannel:
    """One rank's connection to the store. Use it in one thread; a second thread needs a `clone`.

    `run` is part of every signature, so a message of one run is invalid in another.
    """

    store: Any
    secret: bytes = field(repr=False)
    run: str = ""

    def clone(self) -> RankChannel:
        """Another connection to the same store."""
        return RankChannel(self.store.clone(), self.secret, self.run)

    def group_store(self) -> Any:
        """The store in which torch makes a process group of the ranks. torch signs nothing."""
        return PrefixStore("group", self.store)

    def send(self, key: str, data: bytes) -> None:
        """Send a message. Every message needs a new key."""
        pieces = range(0, max(1, len(data)), _PIECE_BYTES)
        for number, start in enumerate(pieces):
            self.store.set(f"{key}/{number}", data[start : start + _PIECE_BYTES])
        self.post(key, len(pieces).to_bytes(4, "big") + hashlib.sha256(data).digest())

    def is_there(self, key: str) -> bool:
        """Whether a message, signed or not, has this key."""
        found: bool = self.store.check([key])
        return found

    def receive(self, key: str, timeout_seconds: float) -> bytes:
        """Wait for the message, and remove it from the store.

        Raises RankError if this run did not sign it, and the store's own errors (see `is_timeout`).
        """
        self.store.wait([key], datetime.timedelta(seconds=timeout_seconds))
        head = self._verified(key, self.store.get(key))
        if head is None:
            raise _unsigned(key)
        names = [f"{key}/{number}" for number in range(int.from_bytes(head[:4], "big"))]
        data = b"".join(self.store.get(name) for name in names)
        if not hmac.compare_digest(head[4:], hashlib.sha256(data).digest()):
            raise _unsigned(key)
        for name in (key, *names):
            self.store.delete_key(name)
        return data

    def post(self, key: str, data: bytes) -> None:
        """Write a short notice, and replace an older one with this key."""
        self.store.set(key, self._tag(key, data) + data)

    def read(self, key: str) -> bytes | None:
        """Read the notice, which stays in the store. None if there is none, or if this run did not sign it."""
        return self._verified(key, self.store.get(key)) if self.store.check([key]) else None

    def _tag(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self.secret, f"{self.run}\0{key}\0".encode() + data, "sha256")

    def _verified(self, key: str, value: bytes) -> bytes | None:
        tag, data = value[:_TAG_BYTES], value[_TAG_BYTES:]
        return data if hmac.compare_digest(tag, self._tag(key, data)) else None


def is_timeout(error: Exception) -> bool:
    """Whether this error of the store is a timeout. If not, the store is gone."""
    return isinstance(error, DistStoreError) and "imeout" in str(error)


def _unsigned(key: str) -> RankError:
    what = f"the message {key} in the ranks' store is not signed with the secret of this run"
    return RankError(f"{what}: something else writes there; let only the ranks reach MASTER_ADDR and MASTER_PORT")
