"""How a run reaches its workers: `Connector` starts or finds one, and `MessageChannel` carries the messages to it.

A component of the kind `workers` is a class or function that returns a Connector. A run chooses it with `--worker
NAME`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import trio

MESSAGE_BYTES_MAX = 1 << 28  # a longer message is nonsense, and would fill the memory of the reader
CHUNK = 1 << 16


class ChannelClosedError(Exception):
    """The other side has closed the channel, or it broke."""


class MessageChannel(Protocol):
    """Messages in both directions, in order. Both methods raise ChannelClosedError. Several tasks may send, one task
    receives. A cancelled `send` may leave the channel broken.
    """

    async def send(self, message: bytes) -> None:
        """Send one message, which contains no line break."""
        ...

    async def receive(self) -> bytes:
        """The next message."""
        ...

    async def aclose(self) -> None:
        """Close both directions. It does not wait for the other side."""
        ...


class Connection(Protocol):
    """An open channel to a worker. A channel that closes by itself is the death of the worker."""

    channel: MessageChannel

    async def end(self, grace_seconds: float = 0.0) -> str:
        """Close the channel, end the worker if this connection started it, and say how it ended. The worker may clean
        up what its environments share for `grace_seconds`.
        """
        ...

    async def words_of_silence(self) -> str:
        """Why a worker that does not answer may be silent. It takes a few seconds at most."""
        ...


@runtime_checkable
class Connector(Protocol):
    """Starts or finds workers. It is called in a trio loop, in a thread of its own."""

    async def open(self, log: Callable[[bytes], None]) -> Connection:
        """Connect to a new worker. `log` receives what the environment's code prints. Raises WorkerError, which says
        why there is none. If the call is cancelled, it leaves no worker.
        """
        ...


class PipeChannel:
    """A channel over two pipes: one line for each message."""

    def __init__(self, sending: trio.abc.SendStream, receiving: trio.abc.ReceiveStream) -> None:
        self._sending, self._receiving = sending, receiving
        self._lock = trio.Lock()
        self._unread = bytearray()

    async def send(self, message: bytes) -> None:
        async with self._lock:
            try:
                await self._sending.send_all(message + b"\n")
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ChannelClosedError("the pipe is closed") from error

    async def receive(self) -> bytes:
        searched = 0
        while (end := self._unread.find(b"\n", searched)) < 0:
            searched = len(self._unread)
            if searched > MESSAGE_BYTES_MAX:
                raise ChannelClosedError(f"a message has more than {MESSAGE_BYTES_MAX} bytes")
            try:
                chunk = await self._receiving.receive_some(CHUNK)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ChannelClosedError("the pipe is closed") from error
            if not chunk:
                raise ChannelClosedError("the pipe is closed")
            self._unread += chunk
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line

    async def aclose(self) -> None:
        for stream in (self._sending, self._receiving):
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await stream.aclose()
