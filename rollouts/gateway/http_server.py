"""An HTTP/1.1 server on trio. h11 parses the protocol. Connections, sizes and times are limited.

    await serve_http(handler, refuse, listeners, HTTPLimits(), stopping, admit)

`handler` answers one request; a connection has one request at a time. `admit` may refuse a request before its body is
read. If a client disconnects, its request is cancelled. If all connections are taken, the one that has waited longest
without a whole request is closed for a new client, so requests that are never finished do not block the server. Not
here: TLS, compression, and the APIs (`api`).
"""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import h11
import msgspec
import trio

from rollouts.bounds import BODIES_BYTES_MAX, BODY_BYTES_MAX
from rollouts.errors import ConfigError

RECEIVE_BYTES = 65536
HEAD_BYTES_MAX = 65536
LINGER_SECONDS = 2.0  # how long the rest of a refused request is read and discarded
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FULL_SECONDS = 0.1  # the time until the next attempt to accept, if the process has no file descriptors left
BACKLOG = 1024  # how many connections may wait to be accepted
SIGNALS = (signal.SIGINT, signal.SIGTERM)


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


def as_json(value: Any, status: int = 200) -> HTTPResponse:
    """A response with a JSON body."""
    return HTTPResponse(status, msgspec.json.encode(value))


def event_stream(events: Sequence[tuple[str, dict[str, Any]]], *, end: bytes = b"") -> HTTPResponse:
    """Server-sent events as one body, each with its name ("": none)."""
    lines = [(f"event: {name}\n".encode() if name else b"", msgspec.json.encode(event)) for name, event in events]
    body = b"".join(name + b"data: " + event + b"\n\n" for name, event in lines)
    return HTTPResponse(200, body + end, "text/event-stream")


class HTTPLimits(NamedTuple):
    """Limits: open connections; bytes of a request's body, and of all bodies that the server holds; seconds to receive
    the head of a request, and its body; seconds between two requests of a connection; seconds that requests in flight
    get when the server stops.
    """

    connections_max: int = 256
    body_bytes_max: int = BODY_BYTES_MAX
    bodies_bytes_max: int = BODIES_BYTES_MAX
    head_seconds: float = 10.0
    receive_seconds: float = 60.0
    idle_seconds: float = 120.0
    grace_seconds: float = 10.0


Handler = Callable[[HTTPRequest], Awaitable[HTTPResponse]]
"""Returns the response to a request. Any exception except a cancellation is a bug, and ends the server."""

Refuse = Callable[[int, str], HTTPResponse]
"""Returns the response to a request that does not reach the handler, from a status and a message."""

Admit = Callable[[HTTPRequest], HTTPResponse | None]
"""Returns the response that refuses a request, from all but its body; None to read the body."""


@dataclass(eq=False)
class _Shared:
    """What the connections of a server share. `waiting` has those without a whole request, the oldest first. `held` is
    the number of bytes of the bodies of all requests.
    """

    limits: HTTPLimits
    stopping: trio.Event
    waiting: dict[trio.CancelScope, None] = field(default_factory=dict)
    held: int = 0

    @contextlib.contextmanager
    def replaceable(self) -> Iterator[None]:
        """While the block runs, the connection may be closed for a new one, or because the server stops: this ends the
        block.
        """
        with trio.CancelScope() as scope:
            self.waiting[scope] = None
            try:
                yield
            finally:
                self.waiting.pop(scope, None)

    def close_oldest(self) -> None:
        """Close the connection that has waited longest, if any waits."""
        if self.waiting:
            scope = next(iter(self.waiting))
            del self.waiting[scope]
            scope.cancel()


async def serve_http(
    handler: Handler,
    refuse: Refuse,
    listeners: Sequence[trio.SocketListener],
    limits: HTTPLimits,
    stopping: trio.Event,
    admit: Admit | None = None,
) -> None:
    """Serve until `stopping` is set. After that, no connection is accepted, and requests in flight get
    `grace_seconds`. `admit` None: every request is read.
    """
    free = trio.Semaphore(limits.connections_max)
    shared = _Shared(limits, stopping)

    async def accept(listener: trio.SocketListener) -> None:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                shared.close_oldest()
                await trio.sleep(FULL_SECONDS)
                continue
            if free.value == 0:
                shared.close_oldest()
            try:
                await free.acquire()
            except trio.Cancelled:
                await trio.aclose_forcefully(stream)
                raise
            connections.start_soon(converse, stream)

    async def converse(stream: trio.SocketStream) -> None:
        try:
            await _Connection(stream, shared).serve(handler, refuse, admit)
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
        for scope in list(shared.waiting):
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

    def __init__(self, stream: trio.SocketStream, shared: _Shared) -> None:
        self._stream, self._shared, self._limits = stream, shared, shared.limits
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._has_body = True  # whether the answer has one: that of HEAD has none
        self._held = 0  # the bytes of the body of the request at hand

    async def serve(self, handler: Handler, refuse: Refuse, admit: Admit | None) -> None:
        try:
            while await self._serve_one(handler, refuse, admit):
                self._release()
        finally:
            self._release()

    async def _serve_one(self, handler: Handler, refuse: Refuse, admit: Admit | None) -> bool:
        """Receive and answer one request. Returns whether another one may follow."""
        parser = self._parser
        request: HTTPRequest | HTTPResponse | None = None
        try:
            with self._shared.replaceable():
                request = await self._request(admit)
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint if error.error_status_hint < 500 else 400
            request = refuse(status, f"this is no HTTP request: {error}")
        except _Refused as error:
            request = refuse(error.status, str(error))
        if isinstance(request, HTTPResponse):
            await self._refuse(request)
        if not isinstance(request, HTTPRequest):
            return False
        response = await self._handle(handler, request)
        if response is None:
            return False
        try:
            await self._answer(response, closes=self._shared.stopping.is_set())
        except (trio.BrokenResourceError, trio.TooSlowError):
            if response.on_lost is not None:
                response.on_lost()
            raise
        if parser.our_state is not h11.DONE or parser.their_state is not h11.DONE:
            return False
        parser.start_next_cycle()
        return True

    def _release(self) -> None:
        self._shared.held -= self._held
        self._held = 0

    async def _request(self, admit: Admit | None) -> HTTPRequest | HTTPResponse | None:
        """The next request; None if the client sends no more; the response of `admit` if it refuses. Raises _Refused,
        h11.RemoteProtocolError.
        """
        self._has_body = True
        if not await self._begins():
            return None
        head = None
        with self._deadline("head", self._limits.head_seconds):
            head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        if head.method == b"CONNECT":
            raise _Refused(405, "this server is no proxy; send a request other than CONNECT")
        self._has_body = head.method != b"HEAD"
        path, _, query = head.target.decode("ascii", "replace").partition("?")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        request = HTTPRequest(head.method.decode("ascii", "replace"), path, b"", headers, query)
        if admit is not None and (refusal := admit(request)) is not None:
            return refusal
        body = await self._body(int(headers.get("content-length", 0)))
        return None if body is None else request._replace(body=body)

    async def _body(self, length: int) -> bytes | None:
        """The body of the request, which says that it has this length; None if the client leaves. Raises _Refused."""
        body = bytearray()
        self._bound(length)
        with self._deadline("body", self._limits.receive_seconds):
            while isinstance(event := await self._event(), h11.Data):
                body += event.data
                self._held += len(event.data)
                self._shared.held += len(event.data)
                self._bound(len(body))
        return bytes(body) if isinstance(event, h11.EndOfMessage) else None

    async def _event(self) -> object:
        """The next event of the protocol."""
        while (event := self._parser.next_event()) is h11.NEED_DATA:
            if self._parser.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            self._parser.receive_data(await self._stream.receive_some(RECEIVE_BYTES))
        return event

    @contextlib.contextmanager
    def _deadline(self, what: str, seconds: float) -> Iterator[None]:
        """Raise _Refused if the block takes longer."""
        with trio.move_on_after(seconds) as scope:
            yield
        if scope.cancelled_caught:
            raise _Refused(408, f"the {what} of the request did not arrive within {seconds:g} seconds")

    async def _begins(self) -> bool:
        """Wait for the first bytes of a request. Returns whether they came; False at once if the server stops."""
        if self._shared.stopping.is_set() or self._parser.trailing_data[0]:
            return not self._shared.stopping.is_set()
        data = b""
        with trio.move_on_after(self._limits.idle_seconds):
            data = await self._stream.receive_some(RECEIVE_BYTES)
        if data:
            self._parser.receive_data(data)
        return bool(data)

    def _bound(self, length: int) -> None:
        if length > self._limits.body_bytes_max:
            raise _Refused(413, f"the body has more than {self._limits.body_bytes_max} bytes")
        if self._shared.held > self._limits.bodies_bytes_max:
            raise _Refused(429, "too many requests with large bodies at the same time; send this one again later")

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
        self._release()
        await self._answer(response, closes=True)
        await self._stream.send_eof()
        with self._shared.replaceable(), trio.move_on_after(LINGER_SECONDS):
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


# --- a server of a command --------------------------------------------------------------------------------------------


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
