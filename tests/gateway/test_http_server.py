"""The HTTP server: requests in, answers out, and every bound holds."""

from __future__ import annotations

import json
import socket
import struct

import pytest
import trio
import trio.testing

from rollouts.gateway.api import unreadable as refusal
from rollouts.gateway.http_server import HTTPLimits, HTTPRequest, HTTPResponse, serve_http

GET = b"GET /x?q=1 HTTP/1.1\r\nHost: h\r\n\r\n"


def post(body: bytes, *more: bytes) -> bytes:
    return b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n" % len(body) + b"".join(more) + b"\r\n" + body


class Handler:
    """Answers with what it was asked; waits where the path says so."""

    def __init__(self) -> None:
        self.requests: list[HTTPRequest] = []
        self.waiting, self.go = trio.Event(), trio.Event()
        self.cancelled = 0
        self.more = b""

    async def __call__(self, request: HTTPRequest) -> HTTPResponse:
        self.requests.append(request)
        if request.path == "/wait":
            self.waiting.set()
            try:
                await self.go.wait()
            except trio.Cancelled:
                self.cancelled += 1
                raise
        return HTTPResponse(200, b"%d bytes" % len(request.body) + self.more, "text/plain")


def served(steps, admit=None, **limits):
    """Run `steps(connect, handler, stopping)` against a server; returns the handler once the server has ended."""
    handler = Handler()

    async def main():
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        stopping = trio.Event()

        streams = []

        async def connect():
            streams.append(await trio.open_tcp_stream("127.0.0.1", port))
            return streams[-1]

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve_http, handler, refusal, listeners, HTTPLimits(**limits), stopping, admit)
                await steps(connect, handler, stopping)
                stopping.set()
            for stream in streams:
                await stream.aclose()

    trio.run(main)
    return handler


async def until(stream, words: bytes) -> bytes:
    seen = b""
    while words not in seen:
        data = await stream.receive_some()
        assert data, seen
        seen += data
    return seen


async def rest(stream) -> bytes:
    return b"".join([data async for data in stream])


def test_a_connection_carries_several_requests():
    async def steps(connect, handler, stopping):
        stream = await connect()
        await stream.send_all(GET)
        assert b"200" in (await until(stream, b"0 bytes"))
        chunked = b"POST /y HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        await stream.send_all(chunked + GET)  # the next one comes with it
        seen = await until(stream, b"0 bytes")
        assert b"5 bytes" in seen

    handler = served(steps)
    assert [(r.method, r.path, r.body) for r in handler.requests] == [
        ("GET", "/x", b""),
        ("POST", "/y", b"abcde"),
        ("GET", "/x", b""),
    ]


def test_the_answer_to_head_has_no_body():
    async def steps(connect, handler, stopping):
        stream = await connect()
        await stream.send_all(GET.replace(b"GET", b"HEAD") + b"nonsense\r\n\r\n")
        first, second, body = (await rest(stream)).split(b"\r\n\r\n")
        assert b"200" in first and b"ength: 7" in first
        assert second.startswith(b"HTTP/1.1 400") and b"no HTTP request" in body

    served(steps)


def test_a_client_that_waits_to_be_asked_for_its_body():
    async def steps(connect, handler, stopping):
        stream = await connect()
        head, _, body = post(b"abc", b"Expect: 100-continue\r\n").partition(b"\r\n\r\n")
        await stream.send_all(head + b"\r\n\r\n")
        await until(stream, b"100 ")
        await stream.send_all(body)
        assert b"3 bytes" in await until(stream, b"bytes")

    served(steps)


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (b"nonsense\r\n\r\n", 400, "no HTTP request"),
        (b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n", 431, "no HTTP request"),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: odd\r\n\r\n", 400, "Transfer-Encoding"),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: \xb2\r\n\r\n", 400, "Content-Length"),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 400, "Content-Length"),
        (b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n", 405, "this server is no proxy"),
        (post(b"x" * 101), 413, "more than 100 bytes"),
        (
            b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n80\r\n" + b"x" * 128,
            413,
            "more than 100 bytes",
        ),
        (post(b"abcd")[:-2], 408, "the body of the request did not arrive within 0.3 seconds"),
        (post(b"abcd")[:20], 408, "the head of the request did not arrive within 0.2 seconds"),
    ],
)
def test_a_request_that_is_refused_ends_its_connection_only(sent, status, words):
    async def steps(connect, handler, stopping):
        stream = await connect()
        await stream.send_all(sent)
        head, _, body = (await rest(stream)).partition(b"\r\n\r\n")
        await stream.aclose()
        assert head.startswith(b"HTTP/1.1 %d" % status), head
        assert words in json.loads(body)["error"]["message"]
        other = await connect()
        await other.send_all(GET)
        await until(other, b"0 bytes")

    served(steps, body_bytes_max=100, head_seconds=0.2, receive_seconds=0.3)


def test_an_idle_connection_is_closed():
    async def steps(connect, handler, stopping):
        assert await rest(await connect()) == b""

    served(steps, idle_seconds=0.05)


def test_a_client_that_leaves_cancels_its_request():
    async def steps(connect, handler, stopping):
        stream = await connect()
        await stream.send_all(GET.replace(b"/x", b"/wait"))
        await handler.waiting.wait()
        await stream.aclose()
        while not handler.cancelled:  # noqa: ASYNC110
            await trio.sleep(0.01)

    assert served(steps).cancelled == 1


def test_a_client_that_resets_its_connection_ends_that_only():
    async def steps(connect, handler, stopping):
        stream = await connect()
        await stream.send_all(GET)
        await until(stream, b"0 bytes")
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await stream.aclose()
        other = await connect()
        await other.send_all(GET)
        await until(other, b"0 bytes")
        await trio.testing.wait_all_tasks_blocked(0.05)

    served(steps)


def test_a_client_that_does_not_read_its_answer_ends_its_connection_only():
    async def steps(connect, handler, stopping):
        handler.more = b"x" * (32 << 20)  # more than the sockets hold
        stream = await connect()
        await stream.send_all(GET)
        await until(stream, b"200")
        await trio.sleep(0.2)
        other = await connect()
        await other.send_all(GET)
        await until(other, b"200")

    served(steps, receive_seconds=0.1)


def test_connections_beyond_the_bound_wait():
    async def steps(connect, handler, stopping):
        first = await connect()
        await first.send_all(GET.replace(b"/x", b"/wait"))
        await handler.waiting.wait()
        second = await connect()
        await second.send_all(GET)
        with trio.move_on_after(0.1) as waited:
            await second.receive_some()
        assert waited.cancelled_caught
        await first.aclose()
        await until(second, b"0 bytes")

    served(steps, connections_max=1)


def test_requests_that_are_never_finished_block_nobody():
    async def steps(connect, handler, stopping):
        halves = [b"", b"GET /x", post(b"abcd")[:-2], GET[:-2]]
        waiting = [await connect() for _ in range(12)]
        for place, stream in enumerate(waiting):
            await stream.send_all(halves[place % 4])
        await trio.testing.wait_all_tasks_blocked(0.01)
        stream = await connect()
        await stream.send_all(GET)
        await until(stream, b"0 bytes")
        assert await rest(waiting[0]) == b"", "the oldest was closed for it"

    served(steps, connections_max=3, head_seconds=60.0)


def test_a_request_is_refused_before_its_body_is_read():
    async def steps(connect, handler, stopping):
        stream = await connect()
        await stream.send_all(post(b"x" * 1000, b"Key: wrong\r\n")[:-1000])
        assert b"401" in await until(stream, b"no such key")
        stream = await connect()
        await stream.send_all(post(b"abc", b"Key: right\r\n"))
        await until(stream, b"3 bytes")

    def admit(request):
        assert request.body == b""
        return None if request.headers["key"] == "right" else HTTPResponse(401, b"no such key", "text/plain")

    assert len(served(steps, admit).requests) == 1


def test_all_bodies_together_are_bounded_and_released():
    async def steps(connect, handler, stopping):
        first, second = await connect(), await connect()
        await first.send_all(post(b"x" * 80)[:-1])
        await trio.testing.wait_all_tasks_blocked(0.01)
        await second.send_all(post(b"x" * 80)[:-1])
        assert b"429" in await until(second, b"send this one again later")
        await first.send_all(b"x")
        for _ in range(3):  # an answered request holds nothing
            await until(first, b"80 bytes")
            await first.send_all(post(b"x" * 80))

    served(steps, body_bytes_max=100, bodies_bytes_max=150)


def test_stopping_answers_what_is_in_flight_and_accepts_nothing():
    async def steps(connect, handler, stopping):
        idle, stream = await connect(), await connect()
        await stream.send_all(GET.replace(b"/x", b"/wait"))
        await handler.waiting.wait()
        stopping.set()
        assert await rest(idle) == b""
        with pytest.raises(OSError):
            await connect()
        handler.go.set()
        assert b"connection: close" in (await rest(stream)).lower()

    assert served(steps).cancelled == 0


def test_stopping_cancels_what_takes_too_long():
    async def steps(connect, handler, stopping):
        stream = await connect()
        await stream.send_all(GET.replace(b"/x", b"/wait"))
        await handler.waiting.wait()
        stopping.set()
        assert await rest(stream) == b""

    assert served(steps, grace_seconds=0.1).cancelled == 1
