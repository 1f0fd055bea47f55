"""HTTP: ask one server many things at once, cheaply, within limits; and what went wrong, as one type.

    async with HTTPClient("http://127.0.0.1:8000", timeout_seconds=600, connections_max=128) as client:
        reply = await client.post("/inference/v1/generate", body, GenerateReply)

At most `connections_max` requests are in flight, each on a connection of its own that is kept for the next one (the one
used last first, so that those no longer needed grow old together); the rest wait in their own tasks, in order. Bodies
and replies are msgspec's: a typed reply is checked while it is decoded. Left out: what each kind of server is asked
(`vllm`, `sglang`), several servers (`pool`).
"""

from __future__ import annotations

import math
import random
import ssl
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast
from urllib.parse import quote, urlsplit, urlunsplit

import h11
import msgspec
import trio

from rollouts.errors import ConfigError, InferenceError

T = TypeVar("T")

FailureKind = Literal["refused", "reset", "timeout", "busy", "server", "client", "garbage"]
"""refused: no connection. reset: it broke or closed before the whole answer. timeout: no whole answer in time.
busy: 429. server: 5xx. client: 4xx, redirects, and a request that cannot be written as JSON. garbage: an answer that is
no HTTP, no JSON, or not the JSON asked.
"""

CHUNK_BYTES = 65_536
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 0.1  # servers close what idles for seconds; to look whether one has costs a system call
MESSAGE_CHARACTERS_MAX = 500
RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
UNREADABLE = (ValueError, RecursionError)
"""What msgspec raises for bytes that are no JSON: its DecodeError and UnicodeDecodeError are ValueErrors; JSON that is
nested too deep is a RecursionError.
"""


# --- what goes wrong --------------------------------------------------------------------------------------------------


class HTTPFailure(InferenceError):
    """A request that got no usable answer.

    `retryable`: the same request may succeed later, or at another server. `status` is the HTTP status where there was
    one; `retry_after_seconds` what the server asked for; `attempts` how often it was asked.
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
    """The failure that an answer with a status other than 2xx is, with the server's own words."""
    words = message_of_body(body) or "no message"
    if 300 <= status < 400:
        words = "the URL redirects elsewhere; give the one that it redirects to"
    return HTTPFailure(
        "busy" if status == 429 else "server" if status >= 500 else "client",
        f"status {status}: {words}",
        retryable=status in RETRYABLE_STATUSES,
        status=status,
        retry_after_seconds=retry_after_seconds,
    )


def message_of_body(body: bytes) -> str:
    """The server's message in an error's body, or the body as text where it is no JSON."""
    try:
        return message_of(msgspec.json.decode(body))
    except UNREADABLE:
        return _cut(body.decode("utf-8", "replace"))


def message_of(found: Any) -> str:
    """The message in the JSON of an error: OpenAI's and vLLM's `error.message`, FastAPI's `detail`, or the text."""
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return _cut(found if isinstance(found, str) else msgspec.json.encode(found).decode())


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MESSAGE_CHARACTERS_MAX else text[:MESSAGE_CHARACTERS_MAX] + "..."


# --- the clients ------------------------------------------------------------------------------------------------------


class Retries(NamedTuple):
    """How often a transient failure is asked again, and after how long: doubling from `first_seconds` up to
    `longest_seconds`, each wait shortened at random by up to a half. `attempt_seconds` bounds one attempt.
    """

    attempts_max: int = 4
    first_seconds: float = 0.25
    longest_seconds: float = 10.0
    attempt_seconds: float = math.inf


class ClientStatistics(NamedTuple):
    """Counts since the client was made, but for the first three, which are of now."""

    in_flight: int
    waiting: int
    connections: int
    connections_opened: int
    requests: int
    retries: int
    failures: Mapping[str, int]


class Reply(NamedTuple):
    """A whole answer. Header names are in lower case."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class HTTPClient:
    """One server. An async context manager: leaving closes every connection; it can be entered once.

    `base_url` may have a path, which goes before every request's. `api_key` is sent as a bearer token and is shown in
    no message. `seed` decides the random part of the waits between attempts.

    Raises ConfigError where the URL or the key cannot be used.
    """

    # Generation goes over h11, everything else over httpx (`PlainClient`). CPU of one turn with ids and logprobs, on
    # trio: httpx with 8 connections a client 0.73 ms, httpcore's single connections 0.26, this 0.15. A turn may cost
    # 0.5 ms in all.

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        timeout_seconds: float = 60.0,
        connections_max: int = 256,
        reply_bytes_max: int = 256 * 2**20,
        retries: Retries = Retries(),  # noqa: B008 - a NamedTuple cannot be changed
        seed: int = 0,
    ) -> None:
        assert connections_max > 0 and retries.attempts_max > 0, (connections_max, retries)
        self._origin, self._host, self._port, self._prefix = read_url(base_url)
        self.url = self._origin + self._prefix
        self._headers = _headers(self._origin, self._host, self._port, api_key)
        self._api_key = api_key
        self._tls = ssl.create_default_context() if self.url.startswith("https:") else None
        self._timeout_seconds, self._retries, self._reply_bytes_max = timeout_seconds, retries, reply_bytes_max
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
        """Close every connection, also those in use: their requests fail, and so do later ones."""
        self._is_closed = True
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._idle.clear()

    def statistics(self) -> ClientStatistics:
        """What it did, and does now."""
        limiter = self._limiter.statistics()
        counts = self._opened, self._requests, self._retried, dict(self._failures)
        return ClientStatistics(limiter.borrowed_tokens, limiter.tasks_waiting, len(self._connections), *counts)

    async def post(
        self,
        path: str,
        body: Any,
        reply_type: type[T],
        *,
        timeout_seconds: float | None = None,
        attempts_max: int | None = None,
    ) -> T:
        """Send `body` (a struct, a dict, or JSON as bytes; None: a GET), and read the answer as a `reply_type` (bytes:
        as it is).

        `timeout_seconds` (None: the client's) bounds all attempts and the waits between them; the wait for a free
        connection comes before.
        `attempts_max` 1: never ask twice, for what may not be done twice. Cancellation closes the connection, which is
        how a server learns that its answer is not wanted any more.

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
                        if self._is_closed:  # as a server that is gone: this may be seen late, and behind a shield
                            raise HTTPFailure("reset", "the connection is closed")
                        with trio.fail_after(retries.attempt_seconds):
                            return _decode(await self._exchange(method, target, data), reply_type)
                    except HTTPFailure as error:
                        failure = error
                    except trio.TooSlowError:
                        words = f"no whole answer within {retries.attempt_seconds:g} seconds"
                        failure = HTTPFailure("timeout", words)
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
                before = f"; the attempt before: {failure}" if failure is not None else ""
                failure = HTTPFailure("timeout", f"no whole answer within {seconds:g} seconds{before}")
                self._failures["timeout"] += 1
            assert failure is not None, "a request that was not answered has failed"
            times = f" (asked {attempt} times)" if attempt > 1 else ""
            words = str(failure).replace(self._api_key, "***") if self._api_key else str(failure)  # it may be repeated
            failure.args, failure.attempts = (f"{method} {self._origin}{target}: {words}{times}",), attempt
            raise failure from failure.__cause__
        finally:
            self._limiter.release()

    async def _exchange(self, method: str, target: str, body: bytes) -> Reply:
        """One attempt, on a connection that is kept if it can be. Raises HTTPFailure."""
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
            return await connection.send(method, target, self._headers, body, self._reply_bytes_max)
        except h11.RemoteProtocolError as error:
            raise HTTPFailure("garbage", f"the answer is no HTTP: {error}") from error
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
        if self._is_closed:  # meanwhile
            connection.close()
        return connection


class PlainClient(HTTPClient):
    """As HTTPClient, by httpx: for what is asked seldom. It also asks with GET.

    `is_direct`: no proxy and no redirect, for a server whose generation goes there directly too.
    """

    def __init__(self, base_url: str, *, is_direct: bool = True, **settings: Any) -> None:
        super().__init__(base_url, **settings)
        self._is_direct = is_direct
        self._httpx: Any = None
        self._scopes: set[trio.CancelScope] = set()  # of the requests under way

    async def __aenter__(self) -> Self:
        import httpx

        httpx.AsyncHTTPTransport(verify=False)  # imports the rest of it: that takes long, and is no part of a request
        return await super().__aenter__()

    async def aclose(self) -> None:
        """Close every connection, also those in use: their requests fail, and so do later ones."""
        await super().aclose()
        for scope in self._scopes:  # httpx knows only of the connections that are made
            scope.cancel()
        if self._httpx is not None:
            await self._httpx.aclose()

    async def get(self, path: str, reply_type: type[T], **bounds: Any) -> T:
        """As `post`, without a body."""
        return await self.post(path, None, reply_type, **bounds)

    async def _exchange(self, method: str, target: str, body: bytes) -> Reply:
        import httpx

        if self._httpx is None:
            try:
                self._httpx = httpx.AsyncClient(
                    verify=self._tls or not self._is_direct,  # without TLS there is nothing to verify, until a redirect
                    timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                    limits=httpx.Limits(max_connections=None),
                    trust_env=not self._is_direct,
                    mounts=dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]")),  # never by a proxy
                    follow_redirects=not self._is_direct,
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
                        if size > self._reply_bytes_max:
                            scope.cancel()  # to leave the loop would leave httpx's generators open
        except httpx.ConnectTimeout:
            raise HTTPFailure("timeout", f"no connection within {CONNECT_SECONDS:g} seconds") from None
        except (httpx.ConnectError, httpx.InvalidURL, UnicodeError) as error:  # a name that no host can have
            words = _reason(error)
            secure, untrusted = "secure " if "SSL" in words else "", "CERTIFICATE_VERIFY_FAILED" in words
            raise HTTPFailure("refused", f"no {secure}connection: {words}", retryable=not untrusted) from error
        except httpx.RemoteProtocolError as error:
            if "disconnected" not in str(error) and "closed connection" not in str(error):
                raise HTTPFailure("garbage", f"the answer is no HTTP: {error}") from error
            raise _closed_early() from error
        except httpx.HTTPError as error:
            raise HTTPFailure("reset", f"the connection broke: {_reason(error)}") from error
        finally:
            self._scopes.discard(scope)
        if scope.cancelled_caught and self._is_closed:
            raise HTTPFailure("reset", "the connection is closed")
        _check_size(size, self._reply_bytes_max)
        return Reply(found.status_code, {name.lower(): value for name, value in found.headers.raw}, b"".join(parts))


class _Connection:
    """One HTTP/1.1 connection that carries one request at a time: h11 knows the grammar, trio moves the bytes. After an
    exception or a cancellation it is closed.
    """

    def __init__(self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream
        self._socket = stream.transport_stream.socket if isinstance(stream, trio.SSLStream) else stream.socket
        self._parser = h11.Connection(h11.CLIENT)
        self._used_at = trio.current_time()
        self.is_open = True

    def is_fresh(self) -> bool:
        """Whether it may carry another request: one that idled is not, where its server has closed it or spoken."""
        has_idled = trio.current_time() - self._used_at > IDLE_SECONDS
        return self.is_open and not (has_idled and self._socket.is_readable())

    async def send(
        self, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes, bytes_max: int
    ) -> Reply:
        """One request, one answer. It is closed afterwards unless both sides would keep it.

        Raises h11.RemoteProtocolError (what came is no HTTP), HTTPFailure, trio.BrokenResourceError.
        """
        finished = False
        try:
            parser = self._parser
            length = (b"content-length", b"%d" % len(body))
            head = parser.send(h11.Request(method=method, target=target, headers=[*headers, length]))
            assert head is not None, "a request has bytes"
            parser.send(h11.Data(data=body))  # framed by its length: the bytes as they are
            parser.send(h11.EndOfMessage())
            await self._stream.send_all(head + body)
            reply = await self._receive(bytes_max)
            if parser.our_state is h11.DONE and parser.their_state is h11.DONE and not parser.trailing_data[0]:
                parser.start_next_cycle()
                self._used_at = trio.current_time()
                finished = True
            return reply
        finally:
            if not finished:
                self.close()

    async def _receive(self, bytes_max: int) -> Reply:
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
                _check_size(size, bytes_max)
                parts.append(bytes(event.data))
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.EndOfMessage):
                assert response is not None, "h11 ends no message that did not begin"
                return Reply(response.status_code, dict(response.headers), b"".join(parts))

    def close(self) -> None:
        """Close the socket, without a word and without waiting; twice is harmless."""
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
    """As `limiter.acquire()`, which lets every other task run first; what is sent next waits anyway."""
    try:
        limiter.acquire_nowait()
    except trio.WouldBlock:
        await limiter.acquire()


# --- addresses, bodies ------------------------------------------------------------------------------------------------


def read_url(base_url: str) -> tuple[str, str, int, str]:
    """The URL up to its path, the host in ASCII, as DNS knows it, the port, and the path. Raises ConfigError."""
    try:
        parts = urlsplit(base_url.strip())
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the server's URL cannot be read: {error}") from None
    if parts.username or parts.password:
        raise ConfigError("the server's URL holds a name or a password; give an API key instead")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        shown = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))  # a query may hold a key
        more = ", with nothing from a ? or a # on" if parts.query or parts.fragment else ""
        raise ConfigError(f"the server's URL is {shown!r}; expected one such as http://127.0.0.1:8000{more}")
    prefix = parts.path.rstrip("/")
    if not _is_printable_ascii(prefix):
        raise ConfigError(
            f"the server's URL has the path {prefix!r}, and a path is written in ASCII without spaces; type "
            f"{quote(prefix, safe='/%:@!$&()*+,;=~')}"
        )
    try:
        host, reason = parts.hostname.encode("idna").decode("ascii"), "it has a space or cannot be printed"
    except UnicodeError as error:
        host, reason = " ", str(error.__cause__ or error)
    if not _is_printable_ascii(host):
        raise ConfigError(
            f"the server's URL names the host {parts.hostname!r}, which no host can be called: {reason}; expected one "
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
            raise ConfigError("the API key has characters that no header may have; is there a line break in it?")
        headers.append((b"authorization", b"Bearer " + api_key.encode()))
    return headers


@lru_cache(maxsize=256)
def _decoder(reply_type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(reply_type)


def _encode(body: Any) -> bytes:
    """The request's bytes. Raises HTTPFailure: text with half of a surrogate pair, say, has no bytes."""
    if isinstance(body, bytes):
        return body
    try:
        return msgspec.json.encode(body)
    except (*UNREADABLE, TypeError) as error:
        raise HTTPFailure("client", f"the request cannot be written as JSON: {error}", retryable=False) from error


def _decode(reply: Reply, reply_type: type[T]) -> T:
    """The answer as what was asked for. Raises HTTPFailure."""
    if not 200 <= reply.status < 300:
        raise failure_of_status(reply.status, reply.body, _retry_after(reply.headers.get(b"retry-after", b"")))
    if reply_type is bytes:
        return reply.body  # type: ignore[return-value]
    try:
        decoded: T = _decoder(cast(Any, reply_type)).decode(reply.body)
    except msgspec.ValidationError as error:  # JSON, but another server's: it will not be this one tomorrow
        raise HTTPFailure("garbage", f"the answer is not what was asked for: {error}", retryable=False) from error
    except UNREADABLE as error:
        begin = reply.body[:80].decode("utf-8", "replace")
        raise HTTPFailure("garbage", f"the answer is not JSON ({error}): {begin!r}") from error
    return decoded


def _retry_after(value: bytes) -> float | None:
    """Seconds, from a header that holds seconds or a date; None where it holds neither."""
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


def _check_size(size: int, bytes_max: int) -> None:
    if size > bytes_max:
        raise HTTPFailure("garbage", f"the answer has more than {bytes_max} bytes", retryable=False)


def _closed_early() -> HTTPFailure:
    return HTTPFailure("reset", "the server closed the connection before its answer was whole")


def _reason(error: BaseException) -> str:
    """An operating system's words, which httpx hides, and trio in a group where a name has several addresses."""
    cause = error
    while not getattr(cause, "errno", None) and (before := cause.__cause__ or cause.__context__):
        cause = before
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
