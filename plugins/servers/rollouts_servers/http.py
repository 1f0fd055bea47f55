"""HTTP clients for one server: many concurrent requests within limits, and one exception type for failures.

    async with HTTPClient("http://127.0.0.1:8000", timeout_seconds=600, connections_max=128) as client:
        reply = await client.post("/inference/v1/generate", body, GenerateReply)

At most `connections_max` requests are in flight, each on its own connection; the others wait in order. Connections are
reused, the most recently used one first, so that idle ones time out. msgspec encodes bodies and decodes replies; a
reply is checked against its type while it is decoded. `HTTPClient` is for servers of models, and `ProxyClient` for APIs
on the internet. The requests themselves are in `vllm`, `sglang` and `openai`.
"""

from __future__ import annotations

import math
import random
import ssl
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast
from urllib.parse import quote, urlsplit, urlunsplit

import h11
import msgspec
import trio

from rollouts.errors import ConfigError, EngineRequestError

T = TypeVar("T")

FailureKind = Literal["refused", "reset", "timeout", "busy", "server", "client", "garbage"]
"""refused: no connection. reset: the connection broke before the reply was complete. timeout: the reply came too late.
busy: 429. server: 5xx. client: 4xx, redirects, and a request that JSON cannot represent. garbage: a reply that is not
HTTP, not JSON, or not the expected JSON.
"""

CHUNK_BYTES = 65_536
CONNECT_SECONDS = 10.0
REPLY_BYTES_MAX = 256 * 2**20
IDLE_SECONDS = 0.1  # servers close idle connections after seconds; checking this costs a system call
MESSAGE_CHARACTERS_MAX = 500
RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
UNREADABLE = (ValueError, RecursionError)
"""The exceptions of msgspec for bytes that are not JSON, which are ValueErrors, or that are nested too deeply."""


# --- failures ---------------------------------------------------------------------------------------------------------


class HTTPFailure(EngineRequestError):
    """A request without a usable reply.

    `retryable`: the same request may succeed later, or at another server. `status` is the HTTP status, if there was a
    reply. `retry_after_seconds` comes from the server. `attempts` counts the attempts.
    """

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        retryable: bool = True,
        status: int | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message, is_transient=retryable)
        self.kind, self.retryable, self.status = kind, retryable, status
        self.retry_after_seconds, self.attempts = retry_after_seconds, 1


def failure_of_status(status: int, body: bytes, retry_after_seconds: float | None) -> HTTPFailure:
    """The failure for a status other than 2xx, with the server's message."""
    words = message_of_body(body) or "no message"
    if 300 <= status < 400:
        words = "the URL redirects elsewhere; give the URL that it redirects to"
    return HTTPFailure(
        "busy" if status == 429 else "server" if status >= 500 else "client",
        f"status {status}: {words}",
        retryable=status in RETRYABLE_STATUSES,
        status=status,
        retry_after_seconds=retry_after_seconds,
    )


def message_of_body(body: bytes) -> str:
    """The server's message in the body of an error; the body as text if it is not JSON."""
    try:
        return error_message(msgspec.json.decode(body))
    except UNREADABLE:
        return _cut(body.decode("utf-8", "replace"))


def error_message(found: Any) -> str:
    """The message in an error's JSON: `error.message` (OpenAI, vLLM), `detail` (FastAPI), or the whole JSON."""
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return _cut(found if isinstance(found, str) else msgspec.json.encode(found).decode())


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MESSAGE_CHARACTERS_MAX else text[:MESSAGE_CHARACTERS_MAX] + "..."


# --- the clients ------------------------------------------------------------------------------------------------------


class Retries(NamedTuple):
    """How retryable failures are retried. The delay before each attempt doubles from `first_seconds` up to
    `longest_seconds`, and is shortened at random by up to a half.
    """

    attempts_max: int = 4
    first_seconds: float = 0.25
    longest_seconds: float = 10.0


class ClientStatistics(NamedTuple):
    """Counters of a client. The first three are current numbers; all others count since the client was created."""

    in_flight: int
    waiting: int
    connections: int
    connections_opened: int
    requests: int
    retries: int
    failures: Mapping[str, int]


class HTTPReply(NamedTuple):
    """A complete reply. Header names are in lower case."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class HTTPClient:
    """A client for one server. It is an async context manager that you enter once; leaving closes all connections.

    `base_url` may have a path, which is put before the path of every request. `api_key` is sent as a bearer token and
    never appears in a message. `seed` determines the random part of retry delays.

    Raises ConfigError if the URL or the key cannot be used.
    """

    # It uses h11 itself. CPU time of one turn with ids and logprobs: httpx with 8 connections per client 0.73 ms,
    # httpcore's single connections 0.26 ms, this class 0.15 ms. The budget for a turn is 0.5 ms.

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        timeout_seconds: float = 60.0,
        connections_max: int = 256,
        retries: Retries = Retries(),  # noqa: B008 - a NamedTuple cannot be changed
        seed: int = 0,
    ) -> None:
        assert connections_max > 0 and retries.attempts_max > 0, (connections_max, retries)
        self._origin, self._host, self._port, self._prefix = read_url(base_url)
        self.url = self._origin + self._prefix
        self._headers = _headers(self._origin, self._host, self._port, api_key)
        self._api_key = api_key
        self._tls = ssl.create_default_context() if self.url.startswith("https:") else None
        self._timeout_seconds, self._retries = timeout_seconds, retries
        self._rng = random.Random(seed)
        self._limiter = trio.CapacityLimiter(connections_max)
        self._connections: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._is_closed = False
        self._opened = self._requests = self._retried = 0
        self._failures: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection, also those in use. Requests in flight and later requests fail."""
        self._is_closed = True
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._idle.clear()

    def statistics(self) -> ClientStatistics:
        """The client's current counters."""
        limiter = self._limiter.statistics()
        counts = self._opened, self._requests, self._retried, dict(self._failures)
        return ClientStatistics(limiter.borrowed_tokens, limiter.tasks_waiting, len(self._connections), *counts)

    async def get(self, path: str, reply_type: type[T], **bounds: Any) -> T:
        """Like `post`, without a body."""
        return await self.post(path, None, reply_type, **bounds)

    async def post(
        self,
        path: str,
        body: Any,
        reply_type: type[T],
        *,
        timeout_seconds: float | None = None,
        attempts_max: int | None = None,
        each_attempt: AbstractAsyncContextManager[Any] = nullcontext(),  # noqa: B008 - it has no state
    ) -> T:
        """Send `body` and decode the reply as `reply_type`. Each attempt, and its failure, is inside `each_attempt`.

        `body` is a struct, a dict, or JSON as bytes; None sends a GET. A `reply_type` of bytes returns the raw reply.
        `timeout_seconds` (None: the client's) covers all attempts and the delays between them, but not the wait for a
        free connection. Use `attempts_max` 1 for a request that must not be repeated. Cancellation closes the
        connection, so that the server stops working on the request.

        Raises HTTPFailure.
        """
        method = "GET" if body is None else "POST"
        target, data = self._prefix + path, b"" if body is None else _encode(body)
        failure, attempt, retries = None, 0, self._retries
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        await acquire(self._limiter)
        try:
            self._requests += 1
            with trio.CancelScope(deadline=trio.current_time() + seconds) as scope:
                while True:
                    attempt += 1
                    try:
                        if self._is_closed:  # the client was closed while this task waited, perhaps in a shielded scope
                            raise HTTPFailure("reset", "the connection is closed")
                        async with each_attempt:
                            return _decode(await self._exchange(method, target, data), reply_type)
                    except HTTPFailure as error:
                        failure = error
                    self._failures[failure.kind] += 1
                    is_last = self._is_closed or attempt >= (attempts_max or retries.attempts_max)
                    if is_last or not failure.retryable:
                        break
                    delay = min(retries.first_seconds * 2.0 ** (attempt - 1), retries.longest_seconds)
                    delay = max(delay * (1.0 - self._rng.random() / 2), failure.retry_after_seconds or 0.0)
                    if trio.current_time() + delay >= scope.deadline:
                        break
                    self._retried += 1
                    await trio.sleep(delay)
            if scope.cancelled_caught:
                before = f"; the previous attempt: {failure}" if failure is not None else ""
                failure = HTTPFailure("timeout", f"no complete reply within {seconds:g} seconds{before}")
                self._failures["timeout"] += 1
            assert failure is not None, "a request without a reply has failed"
            times = f" ({attempt} attempts)" if attempt > 1 else ""
            # The server may repeat the key.
            words = str(failure).replace(self._api_key, "***") if self._api_key else str(failure)
            failure.args, failure.attempts = (f"{method} {self._origin}{target}: {words}{times}",), attempt
            raise failure from failure.__cause__
        finally:
            self._limiter.release()

    async def _exchange(self, method: str, target: str, body: bytes) -> HTTPReply:
        """One attempt. The connection is kept for reuse if possible. Raises HTTPFailure."""
        connection = None
        while self._idle and connection is None:
            connection = self._idle.pop()
            if not connection.is_fresh():
                connection.close()
                self._connections.discard(connection)
                connection = None
        if connection is None:
            connection = await self._connect()
        try:
            return await connection.send(method, target, self._headers, body)
        except h11.RemoteProtocolError as error:
            raise HTTPFailure("garbage", f"the reply is not HTTP: {error}") from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise HTTPFailure("reset", f"the connection broke: {error.__cause__ or error}") from error
        finally:
            if connection.is_open and not self._is_closed:
                self._idle.append(connection)
            else:
                self._connections.discard(connection)

    async def _connect(self) -> _Connection:
        try:
            with trio.fail_after(CONNECT_SECONDS):
                stream = await trio.open_tcp_stream(self._host, self._port)
                if self._tls is not None:
                    stream = await _secured(stream, self._tls, self._host)
        except trio.TooSlowError:
            raise HTTPFailure("timeout", f"no connection within {CONNECT_SECONDS:g} seconds") from None
        except OSError as error:
            raise HTTPFailure("refused", f"no connection: {_reason(error)}") from error
        except trio.BrokenResourceError as error:
            cause = error.__cause__
            untrusted = isinstance(cause, ssl.SSLCertVerificationError)
            raise HTTPFailure("refused", f"no secure connection: {cause or error}", retryable=not untrusted) from error
        connection = _Connection(stream)
        self._connections.add(connection)
        self._opened += 1
        if self._is_closed:  # the client was closed during the handshake
            connection.close()
        return connection


_LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")


class ProxyClient(HTTPClient):
    """Like HTTPClient, but over httpx, which uses the proxies of the environment and follows redirects."""

    def __init__(self, base_url: str, **settings: Any) -> None:
        super().__init__(base_url, **settings)
        self._httpx: Any = None
        self._scopes: set[trio.CancelScope] = set()  # of the requests in flight

    async def aclose(self) -> None:
        """Close every connection, also those in use. Requests in flight and later requests fail."""
        await super().aclose()
        for scope in self._scopes:  # httpx closes established connections only
            scope.cancel()
        if self._httpx is not None:
            await self._httpx.aclose()

    async def _exchange(self, method: str, target: str, body: bytes) -> HTTPReply:
        import httpx

        if self._httpx is None:
            try:
                self._httpx = httpx.AsyncClient(
                    verify=self._tls or _certificates(),  # without TLS too: a redirect may lead to it
                    timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                    limits=httpx.Limits(max_connections=None),
                    mounts=dict.fromkeys(_LOOPBACK),  # no proxy for loopback
                    follow_redirects=True,
                )
            except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
                words = f"the environment's proxy (ALL_PROXY, HTTP_PROXY) or SSL_CERT_FILE cannot be used: {error}"
                raise HTTPFailure("refused", words, retryable=False) from error
        parts, size = list[bytes](), 0
        request = self._httpx.stream(method, f"{self._origin}{target}", headers=self._headers[1:], content=body)
        self._scopes.add(scope := trio.CancelScope())
        try:
            with scope:
                async with request as found:
                    async for part in found.aiter_bytes():
                        parts.append(part)
                        size += len(part)
                        if size > REPLY_BYTES_MAX:
                            scope.cancel()  # breaking out of the loop would leave httpx's generators open
        except httpx.ConnectTimeout:
            raise HTTPFailure("timeout", f"no connection within {CONNECT_SECONDS:g} seconds") from None
        except (httpx.ConnectError, httpx.InvalidURL, UnicodeError) as error:  # UnicodeError: an invalid host name
            words = _reason(error)
            secure, untrusted = "secure " if "SSL" in words else "", "CERTIFICATE_VERIFY_FAILED" in words
            raise HTTPFailure("refused", f"no {secure}connection: {words}", retryable=not untrusted) from error
        except httpx.RemoteProtocolError as error:
            if "disconnected" not in str(error) and "closed connection" not in str(error):
                raise HTTPFailure("garbage", f"the reply is not HTTP: {error}") from error
            raise _closed_early() from error
        except httpx.HTTPError as error:
            raise HTTPFailure("reset", f"the connection broke: {_reason(error)}") from error
        finally:
            self._scopes.discard(scope)
        if scope.cancelled_caught and self._is_closed:
            raise HTTPFailure("reset", "the connection is closed")
        _check_size(size)
        return HTTPReply(found.status_code, {name.lower(): value for name, value in found.headers.raw}, b"".join(parts))


@cache
def _certificates() -> ssl.SSLContext:
    """httpx's certificates. To load them takes longer than many requests."""
    import httpx

    return httpx.create_ssl_context()


class _Connection:
    """An HTTP/1.1 connection for one request at a time, parsed by h11. An exception or a cancellation closes it."""

    def __init__(self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream
        self._socket = stream.transport_stream.socket if isinstance(stream, trio.SSLStream) else stream.socket
        self._parser = h11.Connection(h11.CLIENT)
        self._used_at = trio.current_time()
        self.is_open = True

    def is_fresh(self) -> bool:
        """Whether the connection can be reused: not if the server closed it or sent something while it was idle."""
        has_idled = trio.current_time() - self._used_at > IDLE_SECONDS
        return self.is_open and not (has_idled and self._socket.is_readable())

    async def send(self, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes) -> HTTPReply:
        """Send one request and receive its reply. Then closes the connection, unless both sides keep it open.

        Raises h11.RemoteProtocolError (the reply is not HTTP), HTTPFailure, trio.BrokenResourceError.
        """
        finished = False
        try:
            parser = self._parser
            length = (b"content-length", b"%d" % len(body))
            head = parser.send(h11.Request(method=method, target=target, headers=[*headers, length]))
            assert head is not None, "a request has bytes"
            parser.send(h11.Data(data=body))  # framed by its length, so the bytes are sent unchanged
            parser.send(h11.EndOfMessage())
            await self._stream.send_all(head + body)
            reply = await self._receive()
            if parser.our_state is h11.DONE and parser.their_state is h11.DONE and not parser.trailing_data[0]:
                parser.start_next_cycle()
                self._used_at = trio.current_time()
                finished = True
            return reply
        finally:
            if not finished:
                self.close()

    async def _receive(self) -> HTTPReply:
        parser, response, parts, size, has_ended = self._parser, None, list[bytes](), 0, False
        while True:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError as error:
                if has_ended:
                    raise _closed_early() from error
                raise
            if event is h11.NEED_DATA:
                data = bytes(await self._stream.receive_some(CHUNK_BYTES))
                has_ended = not data
                parser.receive_data(data)
            elif isinstance(event, h11.Data):
                size += len(event.data)
                _check_size(size)
                parts.append(bytes(event.data))
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.EndOfMessage):
                assert response is not None, "h11 sends EndOfMessage after Response"
                return HTTPReply(response.status_code, dict(response.headers), b"".join(parts))

    def close(self) -> None:
        """Close the socket without waiting and without TLS's closing message. It is safe to close twice."""
        self.is_open = False
        self._socket.close()


async def _secured(stream: trio.SocketStream, tls: ssl.SSLContext, host: str) -> Any:
    """The stream inside TLS. Raises trio.BrokenResourceError, whose cause says why."""
    secured = trio.SSLStream(stream, tls, server_hostname=host, https_compatible=True)
    try:
        await secured.do_handshake()
    except BaseException:
        stream.socket.close()
        raise
    return secured


async def acquire(limiter: trio.CapacityLimiter) -> None:
    """Like `limiter.acquire()`, but if a token is free, without a checkpoint, which the next I/O has."""
    try:
        limiter.acquire_nowait()
    except trio.WouldBlock:
        await limiter.acquire()


# --- addresses, bodies ------------------------------------------------------------------------------------------------


def read_url(base_url: str) -> tuple[str, str, int, str]:
    """Split a URL: everything before the path, the host in ASCII (as in DNS), port, and path. Raises ConfigError."""
    try:
        parts = urlsplit(base_url.strip())
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the server's URL cannot be read: {error}") from None
    if parts.username or parts.password:
        raise ConfigError("the server's URL contains a user name or a password; use an API key instead")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        shown = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))  # a query may contain a key
        more = ", without a query (?) or a fragment (#)" if parts.query or parts.fragment else ""
        raise ConfigError(f"the server's URL is {shown!r}; expected one such as http://127.0.0.1:8000{more}")
    prefix = parts.path.rstrip("/")
    if not _is_printable_ascii(prefix):
        raise ConfigError(
            f"the server's URL has the path {prefix!r}, but a path must be ASCII without spaces; type "
            f"{quote(prefix, safe='/%:@!$&()*+,;=~')}"
        )
    try:
        host, reason = parts.hostname.encode("idna").decode("ascii"), "it has a space or an unprintable character"
    except UnicodeError as error:
        host, reason = " ", str(error.__cause__ or error)
    if not _is_printable_ascii(host):
        raise ConfigError(
            f"the server's URL has the host {parts.hostname!r}, which is not a valid name: {reason}; expected one "
            "such as 127.0.0.1 or my-server.example.org"
        )
    usual = 443 if parts.scheme == "https" else 80
    return f"{parts.scheme}://{parts.netloc}", host, usual if port is None else port, prefix


def _is_printable_ascii(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def _headers(origin: str, host: str, port: int, api_key: str) -> list[tuple[bytes, bytes]]:
    shown = f"[{host}]" if ":" in host else host
    is_usual = port == (443 if origin.startswith("https:") else 80)
    headers = [
        (b"host", (shown if is_usual else f"{shown}:{port}").encode("ascii")),
        (b"accept", b"application/json"),
        (b"content-type", b"application/json"),
        (b"user-agent", b"rollouts"),
    ]
    if api_key:
        if not _is_printable_ascii(api_key):
            raise ConfigError(
                "the API key has characters that are not allowed in a header; is there a line break in it?"
            )
        headers.append((b"authorization", b"Bearer " + api_key.encode()))
    return headers


@lru_cache(maxsize=256)
def _decoder(reply_type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(reply_type)


def _encode(body: Any) -> bytes:
    """The request as bytes. Raises HTTPFailure, for example for text with half of a surrogate pair."""
    if isinstance(body, bytes):
        return body
    try:
        return msgspec.json.encode(body)
    except (*UNREADABLE, TypeError) as error:
        raise HTTPFailure("client", f"the request cannot be written as JSON: {error}", retryable=False) from error


def _decode(reply: HTTPReply, reply_type: type[T]) -> T:
    """Decode a reply. Raises HTTPFailure."""
    if not 200 <= reply.status < 300:
        raise failure_of_status(reply.status, reply.body, _retry_after(reply.headers.get(b"retry-after", b"")))
    if reply_type is bytes:
        return reply.body  # type: ignore[return-value]
    try:
        decoded: T = _decoder(cast(Any, reply_type)).decode(reply.body)
    except msgspec.ValidationError as error:  # JSON of another kind of server: a retry does not help
        raise HTTPFailure(
            "garbage", f"the reply does not have the expected fields: {error}", retryable=False
        ) from error
    except UNREADABLE as error:
        begin = reply.body[:80].decode("utf-8", "replace")
        raise HTTPFailure("garbage", f"the reply is not JSON ({error}): {begin!r}") from error
    return decoded


def _retry_after(value: bytes) -> float | None:
    """The seconds to wait, from a Retry-After header (seconds or a date); None for anything else."""
    text = value.decode("latin-1").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            then = parsedate_to_datetime(text)
        except (ValueError, OverflowError):
            return None
        seconds = (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _check_size(size: int) -> None:
    if size > REPLY_BYTES_MAX:
        raise HTTPFailure("garbage", f"the reply has more than {REPLY_BYTES_MAX} bytes", retryable=False)


def _closed_early() -> HTTPFailure:
    return HTTPFailure("reset", "the server closed the connection before its reply was complete")


def _reason(error: BaseException) -> str:
    """The operating system's message. httpx hides it, and trio puts it in a group if a host has several addresses."""
    cause = error
    while not getattr(cause, "errno", None) and (before := cause.__cause__ or cause.__context__):
        cause = before
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
