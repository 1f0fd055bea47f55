"""How a server of a command begins and ends: its address, and the signals that stop it."""

from __future__ import annotations

import errno
import signal
import socket

import trio

from rollouts.errors import ConfigError

BACKLOG = 1024  # how many connections may wait to be accepted
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bound_socket(host: str, port: int, given: str) -> socket.socket:
    """A socket bound to the address. `port` 0 means a free port. Raises ConfigError, which names the flags `given`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        taken = "it is taken; type another --port, or --port 0 for a free one"
        hint = taken if error.errno == errno.EADDRINUSE else str(error)
        raise ConfigError(f"{given} cannot be used: {hint}") from error


async def stop_at_signals(stopping: trio.Event, everything: trio.CancelScope) -> None:
    """Wait for signals. The first one lets requests in flight finish; the second one ends the server at once."""
    with trio.open_signal_receiver(*SIGNALS) as signals:
        async for _ in signals:
            if stopping.is_set():
                everything.cancel()
            stopping.set()
