"""HTTPClient: ask one server many things at once, cheaply, within limits.

    async with HTTPClient("http://127.0.0.1:8000", connections_max=128) as client:
        reply = await client.post("/inference/v1/generate", body, GenerateReply, timeout_seconds=600)

At most `connections_max` requests are in flight, each on a connection of its own, kept for the next one (the one used
last first, so that those no longer needed grow old together); who comes later waits in its own task, in the order of
coming. Bodies and replies are msgspec's: a typed reply is checked while it is decoded. Left out: what is said to which
kind of server (`rollouts.inference.vllm` and its like), several servers.
"""

from __future__ import annotations

import math
import random
import ssl
from collections import Counter
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, cast
from urllib.parse import quote, urlsplit, urlunsplit

import h11
import msgspec
import trio

from rollouts.errors import ConfigError
from rollouts.inference.http.connection import (
    Address,
    ClosedEarlyError,
    Connection,
    Reply,
    TooLongError,
    connect,
)
from rollouts.inference.http.failures import UNREADABLE, HTTPFailure, failure_of_status

__all__ = ["ClientStatistics", "HTTPClient", "Retries", "take_turn"]

T = TypeVar("T")


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


class HTTPClient:
    """One server. An async context manager: leaving closes every connection; it can be entered once.

    `base_url` may have a path, which goes before every request's. `api_key` is sent as a bearer token and stands in no
    message. `seed` decides the random part of the waits between attempts.

    Raises ConfigError where the URL or the key cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        connections_max: int = 256,
        connect_seconds: float = 10.0,
        reply_bytes_max: int = 256 * 2**20,
        retries: Retries = Retries(),  # noqa: B008 - a NamedTuple cannot be changed
        seed: int = 0,
    ) -> None:
        assert connections_max > 0 and retries.attempts_max > 0, (connections_max, retries)
        self.url, self._address, self._prefix = _read_url(base_url)
        self._headers = _headers(self._address, api_key)
        self._api_key = api_key
        self._tls = ssl.create_default_context() if self._address.is_tls else None
        self._retries = retries
        self._connect_seconds, self._reply_bytes_max = connect_seconds, reply_bytes_max
        self._rng = random.Random(seed)
        self._limiter = trio.CapacityLimiter(connections_max)
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []
        self._is_closed = False
        self._opened = self._requests = self._retried = 0
        self._failures: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"HTTPClient({self.url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection, also those in use: their requests fail."""
        self._is_closed = True
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._idle.clear()

    def statistics(self) -> ClientStatistics:
        """What it did, and does now."""
        limiter = self._limiter.statistics()
        return ClientStatistics(
            limiter.borrowed_tokens,
            limiter.tasks_waiting,
            len(self._connections),
            self._opened,
            self._requests,
            self._retried,
            dict(self._failures),
        )

    async def post(
        self, path: str, body: Any, reply_type: type[T], *, timeout_seconds: float, attempts_max: int | None = None
    ) -> T:
        """Send `body` (a struct, a dict, or JSON as bytes), and read the answer as a `reply_type`.

        `timeout_seconds` bounds all attempts and the waits between them; waiting for one's turn comes before.
        `attempts_max` 1: never ask twice, for what may not be done twice. Cancellation closes the connection, which is
        how a server learns that nobody waits any more.

        Raises HTTPFailure.
        """
        return await self._ask(b"POST", path, _encode(body), reply_type, timeout_seconds, attempts_max)

    async def get(
        self, path: str, reply_type: type[T], *, timeout_seconds: float, attempts_max: int | None = None
    ) -> T:
        """As `post`, without a body. A `reply_type` of bytes is given the answer as it is."""
        return await self._ask(b"GET", path, b"", reply_type, timeout_seconds, attempts_max)

    async def _ask(
        self, method: bytes, path: str, body: bytes, reply_type: type[T], timeout_seconds: float, attempts: int | None
    ) -> T:
        target = (self._prefix + path).encode("ascii")
        last, attempt = None, 0
        await take_turn(self._limiter)
        try:
            self._requests += 1
            with trio.CancelScope(deadline=trio.current_time() + timeout_seconds) as scope:
                while True:
                    attempt += 1
                    try:
                        if self._retries.attempt_seconds < timeout_seconds:
                            with trio.fail_after(self._retries.attempt_seconds):
                                return _decode(await self._exchange(method, target, body), reply_type)
                        return _decode(await self._exchange(method, target, body), reply_type)
                    except Exception as error:  # what is not foreseen is raised again by _failure_of
                        last = self._failure_of(error)
                    delay = self._delay(attempt, last, attempts or self._retries.attempts_max)
                    if delay is None or trio.current_time() + delay >= scope.deadline:
                        break
                    self._retried += 1
                    await trio.sleep(delay)
            if scope.cancelled_caught:
                last = self._late(timeout_seconds, last)
            assert last is not None, "a request that was not answered has failed"
            # Not from the failure itself, in which a server may have repeated the key.
            raise self._told(last, method, target, attempt) from last.__cause__
        finally:
            self._limiter.release()

    async def _exchange(self, method: bytes, target: bytes, body: bytes) -> Reply:
        """One attempt, on a connection that is kept if it can be."""
        connection = self._take_idle()
        if connection is None:
            connection = await self._connect()
        try:
            return await connection.ask(method, target, self._headers, body, self._reply_bytes_max)
        finally:
            if connection.is_open and not self._is_closed:
                self._idle.append(connection)
            else:
                self._connections.discard(connection)

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh():
                return connection
            connection.close()
            self._connections.discard(connection)
        return None

    async def _connect(self) -> Connection:
        if self._is_closed:
            raise RuntimeError(f"{self!r} is closed")
        try:
            with trio.fail_after(self._connect_seconds):
                connection = await connect(self._address, self._tls)
        except trio.TooSlowError:
            seconds = self._connect_seconds
            raise HTTPFailure("timeout", f"no connection within {seconds:g} seconds", retryable=True) from None
        except OSError as error:
            raise HTTPFailure("refused", f"no connection: {_reason(error)}", retryable=True) from error
        except trio.BrokenResourceError as error:
            cause = error.__cause__
            untrusted = isinstance(cause, ssl.SSLCertVerificationError)
            raise HTTPFailure("refused", f"no secure connection: {cause or error}", retryable=not untrusted) from error
        self._connections.add(connection)
        self._opened += 1
        return connection

    # --- failures -----------------------------------------------------------------------------------------------------

    def _failure_of(self, error: Exception) -> HTTPFailure:
        """What an attempt's exception says; counted. What it should never have raised is raised again."""
        if isinstance(error, HTTPFailure):
            failure = error
        elif isinstance(error, trio.TooSlowError):
            words = f"no whole answer within {self._retries.attempt_seconds:g} seconds"
            failure = HTTPFailure("timeout", words, retryable=True)
        elif isinstance(error, trio.BrokenResourceError | trio.ClosedResourceError):
            failure = HTTPFailure("reset", f"the connection broke: {error.__cause__ or error}", retryable=True)
        elif isinstance(error, ClosedEarlyError):
            words = "the server closed the connection before its answer was whole"
            failure = HTTPFailure("reset", words, retryable=True)
        elif isinstance(error, h11.RemoteProtocolError):
            failure = HTTPFailure("garbage", f"the answer is no HTTP: {error}", retryable=True)
        elif isinstance(error, TooLongError):
            failure = HTTPFailure("garbage", str(error), retryable=False)
        else:
            raise error
        self._failures[failure.kind] += 1
        return failure

    def _late(self, seconds: float, last: HTTPFailure | None) -> HTTPFailure:
        self._failures["timeout"] += 1
        before = f"; the attempt before: {last}" if last is not None else ""
        return HTTPFailure("timeout", f"no whole answer within {seconds:g} seconds{before}", retryable=True)

    def _delay(self, attempt: int, failure: HTTPFailure, attempts_max: int) -> float | None:
        """Seconds until the next attempt; None: there is none."""
        if not failure.retryable or attempt >= attempts_max:
            return None
        wait = min(self._retries.first_seconds * 2.0 ** (attempt - 1), self._retries.longest_seconds)
        wait *= 1.0 - self._rng.random() / 2
        return max(wait, failure.retry_after_seconds or 0.0)

    def _told(self, failure: HTTPFailure, method: bytes, target: bytes, attempts: int) -> HTTPFailure:
        """The failure with the request's name and the number of attempts, and without the key, whoever repeats it."""
        times = f" (asked {attempts} times)" if attempts > 1 else ""
        words = str(failure).replace(self._api_key, "***") if self._api_key else str(failure)
        place = self.url[: len(self.url) - len(self._prefix)] + target.decode()
        return HTTPFailure(
            failure.kind,
            f"{method.decode()} {place}: {words}{times}",
            retryable=failure.retryable,
            status=failure.status,
            retry_after_seconds=failure.retry_after_seconds,
            attempts=attempts,
        )


async def take_turn(limiter: trio.CapacityLimiter) -> None:
    """As `limiter.acquire()`, which lets every other task run first; what is sent next waits anyway."""
    try:
        limiter.acquire_nowait()
    except trio.WouldBlock:
        await limiter.acquire()


def _read_url(base_url: str) -> tuple[str, Address, str]:
    """The URL without a closing slash, where it leads, and the path before every request's."""
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
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/")
    if not _is_printable_ascii(prefix):
        raise ConfigError(
            f"the server's URL has the path {prefix!r}, and a path is written in ASCII without spaces; type "
            f"{quote(prefix, safe='/%:@!$&()*+,;=~')}"
        )
    address = Address(_host(parts.hostname), (443 if is_tls else 80) if port is None else port, is_tls)
    return f"{parts.scheme}://{parts.netloc}{prefix}", address, prefix


def _host(name: str) -> str:
    """The host as DNS knows it: in ASCII. Raises ConfigError."""
    try:
        host = name.encode("idna").decode("ascii")
        if _is_printable_ascii(host):
            return host
        reason = "it has a space or a character that cannot be printed"
    except UnicodeError as error:
        reason = str(error.__cause__ or error)
    raise ConfigError(
        f"the server's URL names the host {name!r}, which no host can be called: {reason}; expected one such as "
        "127.0.0.1 or my-server.example.org"
    )


def _is_printable_ascii(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def _headers(address: Address, api_key: str) -> list[tuple[bytes, bytes]]:
    host = f"[{address.host}]" if ":" in address.host else address.host
    is_usual = address.port == (443 if address.is_tls else 80)
    headers = [
        (b"host", (host if is_usual else f"{host}:{address.port}").encode("ascii")),
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
        raise failure_of_status(reply.status, reply.body, _retry_after(reply.headers.get(b"retry-after")))
    if reply_type is bytes:
        return reply.body  # type: ignore[return-value]
    try:
        decoded: T = _decoder(cast(Any, reply_type)).decode(reply.body)
    except msgspec.ValidationError as error:  # JSON, but another server's: it will not be this one tomorrow
        raise HTTPFailure("garbage", f"the answer is not what was asked for: {error}", retryable=False) from error
    except UNREADABLE as error:
        begin = reply.body[:80].decode("utf-8", "replace")
        raise HTTPFailure("garbage", f"the answer is not JSON ({error}): {begin!r}", retryable=True) from error
    return decoded


def _retry_after(value: bytes | None) -> float | None:
    """Seconds, from a header that holds seconds or a date."""
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            then = parsedate_to_datetime(text)
        except (ValueError, OverflowError):
            return None
        from datetime import UTC, datetime

        seconds = (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _reason(error: OSError) -> str:
    """An operating system's words; trio hides them in a group where a name has several addresses."""
    cause: BaseException = error
    while isinstance(cause.__cause__, BaseException) and not getattr(cause, "errno", None):
        cause = cause.__cause__
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
