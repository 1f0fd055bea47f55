"""Where ranks meet: a store of torch's, and the secret that signs what they say to each other.

Where all ranks are on one machine, the store listens on loopback only. Ranks of several hosts meet at MASTER_ADDR and
MASTER_PORT, where anything on that network can connect; they need the same secret in their environment.
"""

from __future__ import annotations

import datetime
import os
import secrets
import socket
from typing import Any, NamedTuple

from rollouts.errors import ConfigError
from rollouts.training.backends.messages import Channel

__all__ = ["SECRET", "Place", "join_ranks", "open_here", "place_of_this_process", "secret_of"]

SECRET = "ROLLOUTS_RANKS_SECRET"
_LOOPBACK = "127.0.0.1"
_SECRET_LENGTH_MIN = 16
_TIMEOUT = datetime.timedelta(seconds=300)


class Place(NamedTuple):
    """Which of how many ranks this process is; `launched` by torchrun or the like, or by rank 0 itself."""

    rank: int
    world_size: int
    local_rank: int
    launched: bool


def place_of_this_process() -> Place | None:
    """The place that a launcher gave this process by RANK and WORLD_SIZE; None where nobody launched it.

    Raises ConfigError where only some of the variables are set, or they are no numbers.
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
    return Place(rank, world_size, local_rank, "ROLLOUTS_STARTED_BY_RANK_0" not in os.environ)


def secret_of(place: Place) -> bytes:
    """The secret of this rank's run. Empty where there is none and all ranks are on this machine.

    Raises ConfigError where it is missing, or too short to be one.
    """
    secret = os.environ.get(SECRET, "")
    make = f"type `export {SECRET}=$(openssl rand -hex 32)` on one host, and give all ranks the same value"
    if not secret and not _all_here(place):
        raise ConfigError(
            f"the {place.world_size} ranks are on several hosts, and {SECRET} is not set: commands to ranks are signed "
            f"with it; {make}"
        )
    if secret and len(secret) < _SECRET_LENGTH_MIN:
        raise ConfigError(f"{SECRET} has {len(secret)} characters: expected {_SECRET_LENGTH_MIN} or more; {make}")
    return secret.encode()


def open_here(world_size: int) -> tuple[Channel, dict[str, str]]:
    """Rank 0: a store on loopback with a new secret, and the variables by which ranks that it starts find them."""
    store, port = _listen(world_size, 0)
    secret = secrets.token_hex(32)
    variables = {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(port), SECRET: secret} | _stay_on_loopback()
    return _channel(store, secret.encode()), variables


def join_ranks(place: Place) -> Channel:
    """A rank of a launcher, or one that rank 0 started: the way to the others. Raises ConfigError where the secret is
    missing.
    """
    secret = secret_of(place)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a launcher's store outlives what it restarts
    if _all_here(place):
        _stay_on_loopback()
        store = _store_here(place, attempt)
    else:
        store = _store_of_launcher(place, is_master=place.rank == 0 and not _launcher_has_store())
    return _channel(store, secret, os.environ.get("TORCHELASTIC_RUN_ID", ""), attempt)


def _store_here(place: Place, attempt: str) -> Any:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    port = int(os.environ["MASTER_PORT"])
    if not _launcher_has_store():
        return _listen(place.world_size, port)[0] if place.rank == 0 else _connect(_LOOPBACK, port, place.world_size)
    # The launcher's store listens on every interface, so it is told the port of ours and nothing else.
    shared = PrefixStore(f"rollouts/{attempt}", _store_of_launcher(place, is_master=False))
    if place.rank > 0:
        return _connect(_LOOPBACK, int(shared.get("port")), place.world_size)
    store, port = _listen(place.world_size, 0)
    shared.set("port", str(port))
    return store


def _store_of_launcher(place: Place, *, is_master: bool) -> Any:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return _connect(address, port, place.world_size, is_master=is_master)


def _launcher_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _all_here(place: Place) -> bool:
    """Whether all ranks are on this machine, as far as the launcher says."""
    address = os.environ["MASTER_ADDR"]
    is_loopback = address in ("localhost", "::1") or address.startswith("127.")
    return is_loopback or os.environ.get("LOCAL_WORLD_SIZE") == str(place.world_size)


def _stay_on_loopback() -> dict[str, str]:
    """Have gloo listen on loopback, whatever the machine's name resolves to; gives the variable for other ranks."""
    name = "GLOO_SOCKET_IFNAME"
    loopback = next((each for _, each in socket.if_nameindex() if each in ("lo", "lo0")), None)
    return {} if loopback is None else {name: os.environ.setdefault(name, loopback)}


def _channel(store: Any, secret: bytes, run: str = "", attempt: str = "0") -> Channel:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return Channel(PrefixStore(f"rollouts/{attempt}", store), secret, f"{run}/{attempt}")


def _listen(world_size: int, port: int) -> tuple[Any, int]:
    """A store on loopback, and its port; 0 is any that is free."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        listener = socket.create_server((_LOOPBACK, port))
    except OSError as error:
        raise ConfigError(f"MASTER_PORT {port} is taken ({error.strerror}); give the ranks another one") from error
    port = int(listener.getsockname()[1])
    store = TCPStore(
        _LOOPBACK,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    return store, port


def _connect(address: str, port: int, world_size: int, *, is_master: bool = False) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(address, port, world_size, is_master=is_master, wait_for_workers=False, timeout=_TIMEOUT)
