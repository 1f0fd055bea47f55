"""`rollouts env serve`: serves one environment to runs on this host or on others.

Each connection has a worker process of its own, which loads this environment and no other. This process passes messages
on between the two, and reads none of them. When a connection ends, its worker closes its episodes and ends. Not here:
the client's side (`websocket`), and the worker's process (`process`).
"""

from __future__ import annotations

import codecs
import contextlib
import hmac
import ipaddress
import signal
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import trio

from rollouts.env.workers import channel as limits
from rollouts.env.workers.channel import ChannelClosedError, MessageChannel
from rollouts.env.workers.process import ProcessConnector
from rollouts.env.workers.protocol import Log
from rollouts.env.workers.websocket import CONNECT_SECONDS, ReaderNursery, WebSocketChannel, library
from rollouts.errors import ConfigError, WorkerError, words_of

if TYPE_CHECKING:
    from trio_websocket import WebSocketRequest

CLOSE_SECONDS = 10.0  # how long a worker may take to close its episodes when its connection has ended
CHUNKS_MAX = 1_000  # of what an environment's code has printed, waiting to be sent
HANDSHAKES_MAX = 64  # connections that have not yet said who they are; the oldest gives its place to a new one
REASON_BYTES_MAX = 120  # of a WebSocket's closing reason
SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
