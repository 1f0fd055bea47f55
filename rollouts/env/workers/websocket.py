"""Workers at an address, over WebSockets: `URLConnector` connects to a server of `rollouts env serve`, and
`serve_environment` is that server.

Each message is one message of a WebSocket. A token is sent in the header `Authorization`. Each connection of the server
has a worker process of its own, which loads one environment and no other. The server passes messages on between the
two, and reads none of them. When a connection ends, its worker closes its episodes and ends. The library is
trio-websocket, of the extra `serve`.
"""

from __future__ import annotations

import codecs
import contextlib
import hmac
import ipaddress
import signal
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import trio

from rollouts.author_code import shown
from rollouts.env.workers import channel as limits
from rollouts.env.workers.channel import ChannelClosedError, MessageChannel
from rollouts.env.workers.process import ProcessConnector
from rollouts.env.workers.protocol import Log
from rollouts.errors import ConfigError, UserError, WorkerError, words_of

if TYPE_CHECKING:
    from trio_websocket import WebSocketConnection, WebSocketRequest

CONNECT_SECONDS = 20.0  # how long a server may take to accept a connection
AGAIN_SECONDS = 60.0  # for how long a server that has vanished is tried again
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.1, 5.0  # between two tries; it doubles
END_SECONDS = 2.0
PING_SECONDS = 3.0  # how long the server of a silent worker may take to answer
LOST, TOO_BIG = 1006, 1009  # codes of RFC 6455: the connection broke; a message is too big
CLOSE_SECONDS = 10.0  # how long a worker may take to close its episodes when its connection has ended
CHUNKS_MAX = 1_000  # of what an environment's code has printed, waiting to be sent
HANDSHAKES_MAX = 64  # connections that have not yet said who they are; the oldest gives its place to a new one
REASON_BYTES_MAX = 120  # of a WebSocket's closing reason
SIGNALS = (signal.SIGINT, signal.SIGTERM)


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


# --- the server -------------------------------------------------------------------------------------------------------


class Address(NamedTuple):
    """Where to serve, and for whom. `port` 0: a free one. `token` empty: for everybody who can connect. `tls` None:
    without encryption. `connections` is how many there may be at the same time.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    tls: ssl.SSLContext | None = None
    connections: int = 16

    def url(self, port: int) -> str:
        """The address for clients."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'ws' if self.tls is None else 'wss'}://{host}:{port}"


def check_exposure(host: str, *, has_token: bool, has_tls: bool, is_insecure: bool) -> None:
    """Raise ConfigError if an address other than loopback has no token, or has no TLS and `--insecure` is not given."""
    if _is_loopback(host):
        return
    if not has_token:
        raise ConfigError(
            f"--host {host}: everybody who reaches this address could run the environment's code\ngive a token: "
            "--token-file FILE; to make one: python -c 'import secrets; print(secrets.token_urlsafe())' > FILE"
        )
    if not has_tls and not is_insecure:
        raise ConfigError(
            f"--host {host}: the token and all messages could be read on the way\ngive a certificate: --certificate "
            "FILE --key FILE; or type --insecure if something else encrypts the connection"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(path: Path, flag: str) -> str:
    """The token in a file. Raises ConfigError."""
    try:
        token = path.expanduser().read_text().strip()
    except (OSError, ValueError) as error:
        make = "python -c 'import secrets; print(secrets.token_urlsafe())'"
        raise ConfigError(f"{flag} {path} cannot be read: {error}\nto make one: {make} > {path}") from error
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{flag} {path}: expected one line with a token of ASCII letters, digits and signs")
    return token


def tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The encryption of the server; None without a certificate. Raises ConfigError."""
    if certificate is None:
        if key is not None:
            raise ConfigError(f"--key {key}: give its certificate too: --certificate FILE")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--certificate {certificate} --key {key} cannot be used: {error}") from error
    return context


async def serve_environment(
    address: Address, connector: ProcessConnector, say: Callable[[str], None], ready: Callable[[int], None]
) -> None:
    """Serve until SIGINT or SIGTERM comes. `ready` is called with the port. Raises ConfigError if the address cannot be
    used.
    """
    try:
        listeners: list[Any] = list(await trio.open_tcp_listeners(address.port, host=address.host))
    except OSError as error:
        raise ConfigError(f"--host {address.host} --port {address.port} cannot be used: {error}") from error
    port = listeners[0].socket.getsockname()[1]
    if address.tls is not None:
        listeners = [trio.SSLListener(each, address.tls, https_compatible=True) for each in listeners]
    server = _Server(address, connector, say)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stop, nursery.cancel_scope)
        await nursery.start(trio.serve_listeners, server.handle, listeners)
        ready(port)


async def _stop(everything: trio.CancelScope) -> None:
    with trio.open_signal_receiver(*SIGNALS) as signals:
        async for _ in signals:
            everything.cancel()


class _Server:
    def __init__(self, address: Address, connector: ProcessConnector, say: Callable[[str], None]) -> None:
        self._address, self._connector, self._say = address, connector, say
        self._connections = 0
        self._handshakes: dict[trio.CancelScope, None] = {}  # the oldest first

    async def handle(self, stream: trio.abc.Stream) -> None:
        """Handle one connection. Whatever it sends, the server goes on."""
        try:
            async with trio.open_nursery() as nursery:
                request = None
                with trio.move_on_after(CONNECT_SECONDS) as handshake:
                    readers = ReaderNursery(nursery, handshake)
                    accept = library().wrap_server_stream
                    with self._among_handshakes(handshake):
                        request = await accept(readers, stream, max_message_size=limits.MESSAGE_BYTES_MAX)
                if request is not None:
                    await self._take(request)
                nursery.cancel_scope.cancel()
        except* Exception as group:
            self._say(f"a connection failed: {words_of(group)}")

    @contextlib.contextmanager
    def _among_handshakes(self, handshake: trio.CancelScope) -> Iterator[None]:
        """While the block runs, the handshake counts. If there are too many, the oldest one ends."""
        self._handshakes[handshake] = None
        if len(self._handshakes) > HANDSHAKES_MAX:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        try:
            yield
        finally:
            self._handshakes.pop(handshake, None)

    async def _take(self, request: WebSocketRequest) -> None:
        headers = dict(request.headers)
        refusal = self._refusal(headers)
        if refusal is not None:
            status, why = refusal
            self._say(f"refused a connection: {why}")
            await request.reject(status, extra_headers=[(b"X-Rollouts", b"refused")], body=why.encode())
            return
        self._connections += 1
        try:
            connection = await request.accept()
            reason = await self._relay(WebSocketChannel(connection))
            with trio.move_on_after(CLOSE_SECONDS):
                await connection.aclose(1011, reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore"))
        finally:
            self._connections -= 1

    def _refusal(self, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """The HTTP status and the reason, if this request is refused."""
        if b"origin" in headers:  # a page in a browser could connect to loopback
            return 403, "it comes from a web page"
        if self._address.token:
            given = headers.get(b"authorization", b"")
            if not given:
                return 401, "it needs a token; give it with --worker.token-file FILE, or in ROLLOUTS_WORKER_TOKEN"
            if not hmac.compare_digest(given, b"Bearer " + self._address.token.encode()):
                return 401, "the token is wrong"
        if self._connections >= self._address.connections:
            return 503, f"there are {self._connections} connections already; --count of its server allows no more"
        return None

    async def _relay(self, run: WebSocketChannel) -> str:
        """Pass messages on between a run and a new worker until one of them ends. Returns how the worker ended."""
        printed, waiting = trio.open_memory_channel[bytes](CHUNKS_MAX)

        def log(chunk: bytes) -> None:
            with contextlib.suppress(trio.WouldBlock, trio.BrokenResourceError):  # the run reads slowly, or is gone
                printed.send_nowait(chunk)

        try:
            worker = await self._connector.open(log)
        except WorkerError as error:
            return str(error)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_pass_on, run, worker.channel, nursery.cancel_scope)
                nursery.start_soon(_pass_on, worker.channel, run, nursery.cancel_scope)
                nursery.start_soon(_pass_on_printed, waiting, run)
        finally:
            how = await worker.end(CLOSE_SECONDS)
        return f"its worker ended ({how})"


async def _pass_on(source: MessageChannel, target: MessageChannel, scope: trio.CancelScope) -> None:
    try:
        while True:
            await target.send(await source.receive())
    except ChannelClosedError:
        scope.cancel()


async def _pass_on_printed(chunks: trio.MemoryReceiveChannel[bytes], run: MessageChannel) -> None:
    """Send what the environment's code prints to the run."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with contextlib.suppress(ChannelClosedError):
        async for chunk in chunks:
            await run.send(msgspec.json.encode(Log(decoder.decode(chunk))))
