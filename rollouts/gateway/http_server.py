"""An HTTP/1.1 server on trio. h11 parses the protocol. Connections, sizes and times are limited.

    await serve_http(handler, listeners, HTTPLimits(), stopping)

`handler` answers one request; a connection has one request at a time. If a client disconnects, its request is
cancelled. Not here: TLS, compression, and the APIs (`api`).
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import h11
import trio

RECEIVE_BYTES = 65536
HEAD_BYTES_MAX = 65536
LINGER_SECONDS = 2.0  # how long the rest of a refused request is read and discarded
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FULL_SECONDS = 0.1  # the time until the next attempt to accept, if the process has no file descriptors left


class HTTPRequest(NamedTuple):
    """One request. `path` and `query` are as they were sent, still quoted. The names of `headers` are in lower case."""

    method: str
    path: str
    body: bytes
    headers: Mapping[str, str] = {}
    query: str = ""


class HTTPResponse(NamedTuple):
    """One response. `on_lost` is called if the client leaves before all of it was sent. `headers` are sent besides the
    content's type and length.
    """

    status: int
    body: bytes
    content_type: str = "application/json"
    on_lost: Callable[[], None] | None = None
    headers: Mapping[str, str] = {}


class HTTPLimits(NamedTuple):
    """Limits: open connections; bytes of a request's body; seconds to receive a request; seconds between two requests
    of a connection; seconds that requests in flight get when the server stops.
    """

    connections_max: int = 256
    body_bytes_max: int = 8 << 20
    receive_seconds: float = 60.0
    idle_seconds: float = 120.0
    grace_seconds: float = 10.0


Handler = Callable[[HTTPRequest], Awaitable[HTTPResponse]]
"""Returns the response to a request. Any exception except a cancellation is a bug, and ends the server."""

Refuse = Callable[[int, str], HTTPResponse]
"""Returns the response to a request that does not reach the handler, from a status and a message."""


async def serve_http(
    handler: Handler,
    refuse: Refuse,
    listeners: Sequence[trio.SocketListener],
    limits: HTTPLimits,
    stopping: trio.Event,
) -> None:
    """Serve until `stopping` is set. After that, no connection is accepted, and requests in flight get
    `grace_seconds`.
    """
    free = trio.Semaphore(limits.connections_max)
    idle = set[trio.CancelScope]()  # those of connections that wait for a request

    async def accept(listener: trio.SocketListener) -> None:
        while True:
            await free.acquire()
            try:
                stream = await listener.accept()
            except OSError as error:
                free.release()
                if error.errno not in FULL:
                    raise
                await trio.sleep(FULL_SECONDS)
            except BaseException:
                free.release()
                raise
            else:
                connections.start_soon(converse, stream)

    async def converse(stream: trio.SocketStream) -> None:
        try:
            await _Connection(stream, limits, stopping, idle).serve(handler, refuse)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass  # the client has left, or does not read its answer
        finally:
            free.release()
            with trio.move_on_after(1, shield=True):
                await stream.aclose()

    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            for listener in listeners:
                accepting.start_soon(accept, listener)
            await stopping.wait()
            accepting.cancel_scope.cancel()
        for scope in list(idle):
            scope.cancel()
        for listener in listeners:
            await listener.aclose()
        connections.cancel_scope.deadline = trio.current_time() + limits.grace_seconds


class _Refused(Exception):
    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class _Connection:
    """One connection. Its requests are handled one after the other."""

    def __init__(
        self, stream: trio.SocketStream, limits: HTTPLimits, stopping: trio.Event, idle: set[trio.CancelScope]
    ) -> None:
        self._stream, self._limits, self._stopping, self._idle = stream, limits, stopping, idle
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._has_body = True  # whether the answer has one: that of HEAD has none

    async def serve(self, handler: Handler, refuse: Refuse) -> None:
        parser = self._parser
        while True:
            try:
                request = await self._request()
            except h11.RemoteProtocolError as error:
                await self._refuse(refuse(error.error_status_hint, f"this is no HTTP request: {error}"))
                return
            except _Refused as error:
                await self._refuse(refuse(error.status, str(error)))
                return
            if request is None:
                return
            response = await self._handle(handler, request)
            if response is None:
                return
            try:
                await self._answer(response, closes=self._stopping.is_set())
            except (trio.BrokenResourceError, trio.TooSlowError):
                if response.on_lost is not None:
                    response.on_lost()
                raise
            if parser.our_state is not h11.DONE or parser.their_state is not h11.DONE:
                return
            parser.start_next_cycle()

    async def _request(self) -> HTTPRequest | None:
        """The next request; None if the client sends no more. Raises _Refused, h11.RemoteProtocolError."""
        limits, parser, body = self._limits, self._parser, bytearray()
        head: h11.Request | None = None
        self._has_body = True
        if not await self._begins():
            return None
        with trio.move_on_after(limits.receive_seconds):
            while True:
                event = parser.next_event()
                if event is h11.NEED_DATA:
                    if parser.they_are_waiting_for_100_continue:
                        await self._send(h11.InformationalResponse(status_code=100, headers=[]))
                    parser.receive_data(await self._stream.receive_some(RECEIVE_BYTES))
                elif isinstance(event, h11.Request):
                    head, self._has_body = event, event.method != b"HEAD"
                    length = next((int(value) for name, value in event.headers if name == b"content-length"), 0)
                    self._bound(length)
                elif isinstance(event, h11.Data):
                    body += event.data
                    self._bound(len(body))
                elif isinstance(event, h11.EndOfMessage):
                    assert head is not None, "a message has a head"
                    path, _, query = head.target.decode("ascii", "replace").partition("?")
                    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
                    return HTTPRequest(head.method.decode("ascii", "replace"), path, bytes(body), headers, query)
                else:  # the client has left
                    return None
        raise _Refused(408, f"the request did not arrive within {limits.receive_seconds:g} seconds")

    async def _begins(self) -> bool:
        """Wait for the first bytes of a request. Returns whether they came; False at once if the server stops."""
        if self._parser.trailing_data[0]:
            return not self._stopping.is_set()
        if self._stopping.is_set():
            return False
        data = b""
        with trio.move_on_after(self._limits.idle_seconds) as scope:
            self._idle.add(scope)
            try:
                data = await self._stream.receive_some(RECEIVE_BYTES)
            finally:
                self._idle.discard(scope)
        if data:
            self._parser.receive_data(data)
        return bool(data)

    def _bound(self, length: int) -> None:
        if length > self._limits.body_bytes_max:
            raise _Refused(413, f"the body has more than {self._limits.body_bytes_max} bytes")

    async def _handle(self, handler: Handler, request: HTTPRequest) -> HTTPResponse | None:
        """The handler's response; None if the client disconnects first."""
        response: HTTPResponse | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                try:
                    data = await self._stream.receive_some(RECEIVE_BYTES)
                except trio.BrokenResourceError:
                    data = b""
                if data:  # the bytes belong to the next request
                    self._parser.receive_data(data)
                else:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            response = await handler(request)
            nursery.cancel_scope.cancel()
        return response

    async def _refuse(self, response: HTTPResponse) -> None:
        """Send the response, and read what the client still sends before closing: closing at once would reset the
        connection.
        """
        await self._answer(response, closes=True)
        await self._stream.send_eof()
        with trio.move_on_after(LINGER_SECONDS):
            while await self._stream.receive_some(RECEIVE_BYTES):
                pass

    async def _answer(self, response: HTTPResponse, *, closes: bool) -> None:
        if self._parser.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return  # the client sent something that cannot be answered
        headers = [("content-type", response.content_type), ("content-length", str(len(response.body)))]
        headers += response.headers.items()
        headers += [("connection", "close")] if closes else []
        with trio.fail_after(self._limits.receive_seconds):
            head = h11.Response(status_code=response.status, headers=headers)
            await self._send(head, h11.Data(data=response.body if self._has_body else b""), h11.EndOfMessage())

    async def _send(self, *events: h11.Event) -> None:
        data = b"".join(filter(None, map(self._parser.send, events)))
        if data:
            await self._stream.send_all(data)
