"""One HTTP/1.1 connection that carries one request at a time: h11 knows the grammar, trio moves the bytes.

Why not httpx, measured on trio with ids and logprobs (CPU of one turn): httpx with 8 connections a client 0.73 ms,
its transport alone 0.58, httpcore's pools 0.46, httpcore's single connections 0.26, this 0.15; one httpx client with
128 connections 10. An agent's turn may cost 0.5 in all. Left out: HTTP/2, proxies, redirects, cookies, compression.
"""

from __future__ import annotations

import ssl
from typing import NamedTuple

import h11
import trio

__all__ = ["Address", "ClosedEarlyError", "Connection", "Reply", "TooLongError", "connect"]

CHUNK_BYTES = 65_536
IDLE_SECONDS = 0.1  # servers close what idles for seconds; to look whether one has costs a system call


class Address(NamedTuple):
    """Where a server listens, and the name that its Host header and certificate bear."""

    host: str
    port: int
    is_tls: bool


class Reply(NamedTuple):
    """A whole answer. Header names are in lower case."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class ClosedEarlyError(Exception):
    """The server closed the connection before its answer was whole."""


class TooLongError(Exception):
    """The answer has more bytes than the client takes."""


class Connection:
    """A connected stream with its parser. After an exception or a cancellation it is closed."""

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

    async def ask(
        self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes, bytes_max: int
    ) -> Reply:
        """One request, one answer. It is closed afterwards unless both sides would keep it.

        Raises h11.RemoteProtocolError (what came is no HTTP), ClosedEarlyError, TooLongError, trio.BrokenResourceError.
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
                    raise ClosedEarlyError from error
                raise
            if event is h11.NEED_DATA:
                data = bytes(await self._stream.receive_some(CHUNK_BYTES))
                has_ended = not data
                parser.receive_data(data)
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size > bytes_max:
                    raise TooLongError(f"the answer has more than {bytes_max} bytes")
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


async def connect(address: Address, tls: ssl.SSLContext | None) -> Connection:
    """A new connection. Raises OSError, trio.BrokenResourceError (TLS refused; its cause says why)."""
    stream = await trio.open_tcp_stream(address.host, address.port)
    if tls is None:
        return Connection(stream)
    secured = trio.SSLStream(stream, tls, server_hostname=address.host, https_compatible=True)
    try:
        await secured.do_handshake()
    except BaseException:
        stream.socket.close()
        raise
    return Connection(secured)
