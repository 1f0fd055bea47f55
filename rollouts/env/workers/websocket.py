"""A worker at an address: `URLConnector` connects to a server of `rollouts env serve` (`serving`).

Each message is one message of a WebSocket. A token is sent in the header `Authorization`. The library is
trio-websocket, of the extra `serve`.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import trio

from rollouts.author_code import shown
from rollouts.env.workers import channel as limits
from rollouts.env.workers.channel import ChannelClosedError, MessageChannel
from rollouts.errors import UserError, WorkerError

if TYPE_CHECKING:
    from trio_websocket import WebSocketConnection

CONNECT_SECONDS = 20.0  # how long a server may take to accept a connection
AGAIN_SECONDS = 60.0  # for how long a server that has vanished is tried again
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.1, 5.0  # between two tries; it doubles
END_SECONDS = 2.0
PING_SECONDS = 3.0  # how long the server of a silent worker may take to answer
LOST, TOO_BIG = 1006, 1009  # codes of RFC 6455: the connection broke; a message is too big


def library() -> Any:
    """The module trio_websocket. Raises UserError, which says what to install."""
    try:
        import trio_websocket
    except ImportError as error:
        raise UserError(
            "workers at an address need the package trio-websocket\ntype: pip install 'rollouts-rl[serve]'"
        ) from error
    return trio_websocket


class WebSocketChannel:
    """A channel over a WebSocket."""

    def __init__(self, connection: WebSocketConnection) -> None:
        self._connection = connection

    async def send(self, message: bytes) -> None:
        """Send one message."""
        try:
            await self._connection.send_message(message)
        except library().ConnectionClosed as error:
            raise ChannelClosedError(closing_words(self._connection)) from error

    async def receive(self) -> bytes:
        """The next message."""
        try:
            message = await self._connection.get_message()
        except library().ConnectionClosed as error:
            raise ChannelClosedError(closing_words(self._connection)) from error
        return message.encode() if isinstance(message, str) else message

    async def aclose(self) -> None:
        """Close the connection. It waits for the other side for a moment."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + END_SECONDS):
            await self._connection.aclose()


def closing_words(connection: WebSocketConnection) -> str:
    """Why a connection is closed."""
    closed = connection.closed
    if closed is None or closed.code == LOST:
        return "the connection broke"
    if closed.code == TOO_BIG:
        return f"a message is too big: {closed.reason}"
    return f"the connection was closed: {closed.reason or closed.name}"


class ReaderNursery:
    """In place of a nursery for trio-websocket's reader task: the end of this task cancels the scope, because a
    handshake that fails would be waited for without end.
    """

    def __init__(self, nursery: trio.Nursery, scope: trio.CancelScope) -> None:
        self._nursery, self.scope = nursery, scope
        self.error: Exception | None = None

    def start_soon(self, task: Callable[[], Awaitable[None]]) -> None:
        """Start the task."""
        self._nursery.start_soon(self._run, task)

    async def _run(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except Exception as error:  # a rejected or broken handshake; the task that waits for it reads the error
            self.error = error
        self.scope.cancel()


class URLConnector:
    """Connects to workers at a `ws://` or `wss://` address. `certificate` is a file with the certificates of
    authorities to trust, besides those of the system.
    """

    def __init__(self, url: str, *, token: str = "", certificate: str = "") -> None:
        library()
        self._url, self._token, self._certificate = url, token, certificate
        self._has_connected = False

    async def open(self, log: Callable[[bytes], None]) -> _Socket:
        """Connect. A server that has answered before is tried again for a while. Raises WorkerError."""
        pause, deadline = PAUSE_SECONDS, trio.current_time() + (AGAIN_SECONDS if self._has_connected else 0)
        while True:
            try:
                socket = _Socket(self._url, await self._stream())
                break
            except _UnreachableError as error:
                if trio.current_time() + pause > deadline:
                    raise WorkerError(str(error)) from error
            await trio.sleep(pause)
            pause = min(pause * 2, PAUSE_SECONDS_MAX)
        await socket.shake_hands([(b"Authorization", b"Bearer " + self._token.encode())] if self._token else [])
        self._has_connected = True
        return socket

    async def _stream(self) -> trio.abc.Stream:
        parts = urlsplit(self._url)
        is_tls, host = parts.scheme == "wss", parts.hostname or ""
        port = parts.port or (443 if is_tls else 80)
        try:
            with trio.fail_after(CONNECT_SECONDS):
                stream = await trio.open_tcp_stream(host, port)
                if not is_tls:
                    return stream
                secure = trio.SSLStream(stream, self._context(), server_hostname=host, https_compatible=True)
                try:
                    await secure.do_handshake()
                except (trio.BrokenResourceError, OSError) as error:
                    await trio.aclose_forcefully(secure)
                    raise WorkerError(self._refused(error.__cause__ or error)) from error
                return secure
        except trio.TooSlowError as error:
            raise _UnreachableError(f"no answer from {self._url} in {CONNECT_SECONDS:g} s") from error
        except OSError as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise _UnreachableError(
                f"no server answers at {self._url} ({reason})\n"
                f"type, on that host: rollouts env serve NAME --port {port}"
            ) from error

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if self._certificate:
            try:
                context.load_verify_locations(self._certificate)
            except (OSError, ssl.SSLError) as error:
                raise WorkerError(f"worker.certificate {self._certificate} cannot be read: {error}") from error
        return context

    def _refused(self, error: BaseException) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {self._url} is not trusted: {error.verify_message}\n"
                "if you trust it, give its file, or that of its authority: --worker.certificate FILE"
            )
        return f"{self._url} does not speak TLS ({error}); type ws:// if its line says TLS: no"


class _UnreachableError(WorkerError):
    """Nothing answers at an address."""


class _Socket:
    """A connection to a worker at an address."""

    channel: MessageChannel

    def __init__(self, url: str, stream: trio.abc.Stream) -> None:
        self._url, self._stream = url, stream
        self._scope, self._opened, self._ended = trio.CancelScope(), trio.Event(), trio.Event()
        self._connection: WebSocketConnection | None = None
        self._error: BaseException | None = None

    async def shake_hands(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin to talk. Raises WorkerError."""
        trio.lowlevel.spawn_system_task(self._run, headers)
        try:
            await self._opened.wait()
        except trio.Cancelled:
            self._scope.cancel()
            raise
        if self._connection is None:
            raise WorkerError(self._refused())

    async def _run(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Read from the connection until it is closed."""
        parts = urlsplit(self._url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        with self._scope:
            async with trio.open_nursery() as nursery:
                readers = ReaderNursery(nursery, self._scope)
                with trio.move_on_after(CONNECT_SECONDS):
                    self._connection = await library().wrap_client_stream(
                        readers, self._stream, parts.netloc, path,
                        extra_headers=headers, max_message_size=limits.MESSAGE_BYTES_MAX,
                    )  # fmt: skip
                if self._connection is None:
                    self._scope.cancel()
                else:
                    self.channel = WebSocketChannel(self._connection)
                    self._opened.set()
        self._error = readers.error
        await trio.aclose_forcefully(self._stream)
        self._opened.set()
        self._ended.set()

    def _refused(self) -> str:
        status = getattr(self._error, "status_code", None)
        if status is None:
            return f"{self._url} does not answer as a worker of rollouts: it speaks another protocol, or TLS (wss://)"
        body = (getattr(self._error, "body", None) or b"").decode(errors="replace")
        if dict(getattr(self._error, "headers", None) or ()).get(b"x-rollouts") is not None:
            return f"{self._url} refuses the connection: {body}"
        return f"{self._url} is no worker of rollouts: it answers with HTTP status {status} {shown(body[:80])}"

    async def words_of_silence(self) -> str:
        """Whether the server is silent too, or only its worker."""
        assert self._connection is not None, "it was opened"
        with trio.move_on_after(PING_SECONDS), contextlib.suppress(library().ConnectionClosed):
            await self._connection.ping()
            return (
                f"the server at {self._url} answers, and its worker does not: something blocks its event loop, such as "
                "an async function with time.sleep"
            )
        return f"the host at {self._url} does not answer: it is down, stopped or not reachable"

    async def end(self, grace_seconds: float = 0.0) -> str:
        """Close the connection, and say why it was closed."""
        assert self._connection is not None, "it was opened"
        words = closing_words(self._connection) if self._connection.closed else "the run closed it"
        await self.channel.aclose()
        self._scope.cancel()
        with contextlib.suppress(trio.TooSlowError), trio.CancelScope(shield=True):
            await self._ended.wait()
        return words
