"""HTTPClient against a server in another process, which misbehaves in every way it knows."""

from __future__ import annotations

import importlib.util
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import trio
import trio.testing
from rollouts_servers import http
from rollouts_servers.http import HTTPClient, HTTPFailure, ProxyClient, Retries, message_of_body
from rollouts_servers.vllm import GenerateReply

from rollouts.errors import ConfigError, InferenceError


def load_mock() -> Any:
    path = Path(__file__).parents[3] / "tests" / "servers" / "mock_engine.py"
    specification = importlib.util.spec_from_file_location("mock_engine", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules["mock_engine"] = module
    specification.loader.exec_module(module)
    return module


started = load_mock().started
PATH = "/inference/v1/generate"
BODY = {"request_id": "r", "token_ids": [1, 2, 3]}
QUICK = Retries(attempts_max=4, first_seconds=0.01)


@pytest.fixture(params=[HTTPClient, ProxyClient])
def client(request: pytest.FixtureRequest) -> Any:
    """What both clients do alike: one speaks h11 itself, the other has httpx speak."""
    return request.param


def ask(
    url: str,
    timeout_seconds: float = 10.0,
    body: Any = BODY,
    reply_type: Any = GenerateReply,
    client: Any = HTTPClient,
    **settings: Any,
):
    """One request by a client of its own: what came, and the client's counts."""

    async def run() -> Any:
        async with client(url, **{"retries": QUICK, **settings}) as asking:
            try:
                found = await asking.post(PATH, body, reply_type, timeout_seconds=timeout_seconds)
            except HTTPFailure as failure:
                found = failure
            return found, asking.statistics()

    return trio.run(run)


@contextmanager
def raw_server(*replies: bytes) -> Iterator[str]:
    """Says each of `replies` to one connection, whatever it is asked, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for reply in replies:
                connection, _ = listening.accept()
                with connection:
                    asked = connection.recv(65_536)
                    if asked.startswith(b"POST") and asked.endswith(b"\r\n\r\n"):
                        connection.recv(65_536)  # the body comes by itself; closed unread, it would reset the reply
                    connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)


def test_an_answer_is_decoded_and_its_connection_kept():
    async def run() -> None:
        async with HTTPClient(server.url) as client:
            for _ in range(3):
                reply = await client.post(PATH, BODY, GenerateReply, timeout_seconds=10)
                assert [entry.token_id for entry in reply.choices[0].logprobs.content] == reply.choices[0].token_ids
            assert await client.get("/health", bytes, timeout_seconds=10) == b""
            assert (client.statistics().requests, client.statistics().connections_opened) == (4, 1)

    with started(delay_seconds=0) as server:
        trio.run(run)
        assert server.statistics()["open_max"] == 1


def test_a_chat_is_answered_in_openais_shape():
    """What the mock server says of it is what an OpenAI-compatible engine would."""
    called = [{"role": "user", "content": "12 + 34?"}]

    async def run() -> None:
        async with HTTPClient(f"{server.url}/v1") as client:
            for turn in range(4):
                body = {"model": "policy", "messages": called, "logprobs": True}
                reply = await client.post("/chat/completions", body, dict, timeout_seconds=10)
                (choice,) = reply["choices"]
                assert choice["finish_reason"] == ("stop" if turn == 3 else "tool_calls")
                called.extend([choice["message"], {"role": "tool", "content": "46"}])
            assert choice["message"]["content"] == "The sum is 46."

    with started(delay_seconds=0) as server:
        trio.run(run)


@pytest.mark.parametrize("options", [{"chunked": True}, {"closing": True}, {"idle_seconds": 0.01}])
def test_whatever_a_server_does_with_its_connections(options):
    async def run() -> None:
        async with HTTPClient(server.url, retries=Retries(attempts_max=1)) as client:
            for _ in range(3):
                reply = await client.post(PATH, BODY, GenerateReply, timeout_seconds=10)
                assert reply.choices[0].finish_reason == "stop"
                await trio.sleep(0.2)
            assert client.statistics().connections_opened == (1 if "chunked" in options else 3)

    with started(delay_seconds=0, **options) as server:
        trio.run(run)


@pytest.mark.parametrize(
    ("fault", "kind", "words", "attempts"),
    [
        ("garbage", "garbage", "<html>a proxy says", 4),
        ("close", "reset", "connection broke|closed the connection before its reply was complete", 4),
        ("cut", "reset", "closed the connection before its reply was complete", 4),
        ("429", "busy", "status 429: too many requests", 4),
        ("500", "server", "status 500: Internal Server Error", 4),
        ("400", "client", "status 400: the prompt is too long", 1),
    ],
)
def test_every_misbehaviour_is_named_and_asked_again_only_where_that_is_right(client, fault, kind, words, attempts):
    with started(delay_seconds=0, faults={fault: 1.0}) as server:
        failure, counts = ask(server.url, client=client)
        assert isinstance(failure, HTTPFailure) and isinstance(failure, InferenceError)
        assert (failure.kind, failure.retryable, failure.attempts) == (kind, attempts > 1, attempts), failure
        assert failure.is_transient == failure.retryable, "an episode is not played again for it in vain"
        assert failure.status == (int(fault) if fault.isdigit() else None)
        assert failure.retry_after_seconds == (0.05 if fault == "429" else None)
        assert any(each in str(failure) for each in words.split("|")) and f"POST {server.url}{PATH}: " in str(failure)
        assert server.statistics()["requests"] == attempts
        assert counts.retries == attempts - 1 and counts.failures == {kind: attempts}
        assert counts.in_flight == counts.waiting == 0


def test_what_fails_sometimes_is_answered_in_the_end():
    names = ("garbage", "close", "cut", "429", "500")
    retries = Retries(attempts_max=20, first_seconds=0.001)

    async def run() -> Any:
        async with HTTPClient(server.url, connections_max=16, retries=retries) as client:

            async def one() -> None:
                reply = await client.post(PATH, BODY, GenerateReply, timeout_seconds=60)
                assert reply.choices[0].token_ids

            async with trio.open_nursery() as nursery:
                for _ in range(200):
                    nursery.start_soon(one)
            return client.statistics()

    with started(delay_seconds=0.001, faults={name: 0.04 for name in names}) as server:
        counts = trio.run(run)
        found = server.statistics()
        assert counts.requests == 200 and found["requests"] == 200 + counts.retries
        assert counts.retries == sum(counts.failures.values()) == sum(found["faults"].values()) > 20
        assert set(found["faults"]) == set(names)
        assert set(counts.failures) == {"garbage", "reset", "busy", "server"}


def test_never_more_than_the_connections_allowed():
    async def run() -> Any:
        async with HTTPClient(server.url, connections_max=7) as client:
            async with trio.open_nursery() as nursery:
                for _ in range(60):
                    nursery.start_soon(lambda: client.post(PATH, BODY, GenerateReply, timeout_seconds=10))
            return client.statistics()

    with started(delay_seconds=0.01) as server:
        counts = trio.run(run)
        found = server.statistics()
        assert (found["requests"], found["in_flight_max"], counts.connections_opened) == (60, 7, 7)
        assert found["opened"] == 8  # and the test's own


def test_once_is_once():
    """What may not be done twice is not, and a server that is not there is said to be so."""

    async def run() -> None:
        async with HTTPClient(server.url, retries=QUICK) as client:
            with pytest.raises(HTTPFailure, match="status 500") as caught:
                await client.post(PATH, BODY, GenerateReply, timeout_seconds=10, attempts_max=1)
            assert caught.value.attempts == 1

    with started(delay_seconds=0, faults={"500": 1.0}) as server:
        trio.run(run)
    for client in (HTTPClient, ProxyClient):
        failure, counts = ask(server.url, client=client)
        assert (failure.kind, failure.retryable, counts.retries) == ("refused", True, 3)
        assert "Connection refused (4 attempts)" in str(failure)


@pytest.mark.parametrize("fault", ["hang", "stall"])
def test_a_reply_that_never_ends_is_waited_for_until_the_deadline(client, fault):
    with started(delay_seconds=0, faults={fault: 1.0}) as server:
        seconds, (failure, counts) = timed(lambda: ask(server.url, timeout_seconds=0.3, client=client))
        assert 0.2 < seconds < 10 and (failure.kind, failure.attempts, counts.retries) == ("timeout", 1, 0)
        assert "no complete reply within 0.3 seconds" in str(failure)


def test_the_deadline_holds_for_all_attempts_and_waits():
    retries = Retries(attempts_max=9, first_seconds=0.2, longest_seconds=0.2)
    with started(delay_seconds=0.3, faults={"500": 1.0}) as server:
        failure, _ = ask(server.url, timeout_seconds=0.7, retries=retries)
        assert failure.kind in ("timeout", "server") and failure.attempts < 9
    with started(delay_seconds=0, faults={"429": 1.0}, retry_after_seconds=60) as server:
        failure, counts = ask(server.url, timeout_seconds=5)
        assert counts.retries == 0  # to wait for longer than there is time is no use
        assert (failure.kind, failure.retry_after_seconds, failure.attempts) == ("busy", 60.0, 1)


def timed(function: Any) -> tuple[float, Any]:
    begun = time.monotonic()
    value = function()
    return time.monotonic() - begun, value


def test_waits_double_are_bounded_and_come_from_the_seed():
    async def waited(seed: int) -> float:
        retries = Retries(attempts_max=8, first_seconds=1.0, longest_seconds=10.0)
        async with HTTPClient(url, seed=seed, retries=retries) as client:
            begun = trio.current_time()
            with pytest.raises(HTTPFailure, match="refused"):
                await client.post(PATH, BODY, GenerateReply, timeout_seconds=1_000)
            return trio.current_time() - begun

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    def seconds(seed: int) -> float:
        return trio.run(waited, seed, clock=trio.testing.MockClock(autojump_threshold=0.02))

    longest = 1 + 2 + 4 + 8 + 10 + 10 + 10
    first = seconds(3)
    assert longest / 2 < first < longest
    assert abs(seconds(3) - first) < 0.2 < abs(seconds(4) - first)


def open_sockets() -> int:
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(1 for link in links if link.is_symlink() and os.readlink(link).startswith("socket:"))


@pytest.mark.parametrize("fault", ["hang", "stall"])
def test_cancellation_leaves_no_socket_and_the_server_learns_of_it(fault):
    async def run() -> tuple[int, int, int]:
        async with HTTPClient(server.url, connections_max=8) as client:
            before = open_sockets()
            with trio.move_on_after(0.3) as scope:
                async with trio.open_nursery() as nursery:
                    for _ in range(20):
                        nursery.start_soon(lambda: client.post(PATH, BODY, GenerateReply, timeout_seconds=60))
            assert scope.cancelled_caught
            counts = client.statistics()
            assert (counts.in_flight, counts.waiting, counts.connections) == (0, 0, 0)
            return before, open_sockets(), counts.connections_opened

    with started(delay_seconds=0, faults={fault: 1.0}) as server:
        before, after, opened = trio.run(run)
        assert after == before and opened == 8
        for _ in range(100):
            found = server.statistics()
            if found["open"] == 1:  # the test's own
                break
            time.sleep(0.02)
        assert (found["open"], found["in_flight"], found["abandoned"]) == (1, 0, 8)


def test_leaving_closes_all_and_a_closed_client_is_a_connection_that_is_lost(client):
    async def run() -> None:
        before = open_sockets()
        closed = client(server.url)
        async with closed:
            await closed.post(PATH, BODY, GenerateReply, timeout_seconds=10)
            assert open_sockets() == before + 1
        assert open_sockets() == before
        with pytest.raises(HTTPFailure, match="is closed") as caught:
            await closed.post(PATH, BODY, GenerateReply, timeout_seconds=10)
        assert (caught.value.kind, caught.value.retryable, caught.value.attempts) == ("reset", True, 1)

    with started(delay_seconds=0) as server:
        trio.run(run)


def test_closing_a_client_ends_its_requests_at_once_also_those_that_cannot_be_cancelled(client):
    async def run() -> None:
        closing = client(server.url)

        async def ask_twice() -> None:
            with trio.CancelScope(shield=True):
                for _ in range(2):
                    with pytest.raises(HTTPFailure) as caught:
                        await closing.post(PATH, BODY, GenerateReply, timeout_seconds=10)
                    assert (caught.value.kind, caught.value.attempts) == ("reset", 1)

        with trio.fail_after(3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_twice)
                await trio.sleep(0.2)
                nursery.cancel_scope.cancel()
                await closing.aclose()

    with started(delay_seconds=30) as server:
        trio.run(run)


def test_a_client_that_is_closed_while_it_connects_leaves_no_socket(client, monkeypatch):
    connect, streams = trio.open_tcp_stream, []

    async def slowly(*args: Any, **settings: Any) -> trio.SocketStream:
        await trio.sleep(0.2)
        stream = await connect(*args, **settings)
        streams.append(stream)  # kept, so that no collector closes it
        return stream

    async def run() -> None:
        before = open_sockets()
        closing = client(server.url)

        async def ask() -> None:
            with pytest.raises(HTTPFailure, match="clos") as caught:
                await closing.post(PATH, BODY, GenerateReply, timeout_seconds=10)
            assert (caught.value.kind, caught.value.attempts) == ("reset", 1)

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await trio.sleep(0.1)
                await closing.aclose()
        assert open_sockets() == before

    with started(delay_seconds=0) as server:
        monkeypatch.setattr(trio, "open_tcp_stream", slowly)
        trio.run(run)


OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s"


def test_another_servers_json_and_no_http_at_all(client, monkeypatch):
    with raw_server(OK % (13, b'{"hello": 42}')) as url:
        failure, _ = ask(url, client=client)
        assert (failure.kind, failure.retryable) == ("garbage", False)
        assert "does not have the expected fields: Object missing required field `choices`" in str(failure)
    with raw_server(b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n") as url:
        failure, _ = ask(url, client=client, retries=Retries(attempts_max=1))
        assert failure.kind == "garbage" and "not HTTP" in str(failure)
    monkeypatch.setattr(http, "REPLY_BYTES_MAX", 1000)
    with raw_server(OK % (2000, b"x" * 2000)) as url:
        failure, _ = ask(url, client=client)
        assert (failure.kind, failure.retryable) == ("garbage", False) and "more than 1000 bytes" in str(failure)


def test_a_redirect_of_a_server_is_a_failure():
    with raw_server(b"HTTP/1.1 301 Moved\r\nlocation: /v2\r\ncontent-length: 0\r\n\r\n") as url:
        failure, _ = ask(url)
        assert failure.kind == "client" and "redirects" in str(failure)


def test_an_answer_that_ends_with_its_connection_is_whole(client):
    with raw_server(b'HTTP/1.0 200 OK\r\n\r\n{"choices": []}') as url:
        assert ask(url, client=client)[0] == GenerateReply([])


DISTANT = b"Mon, 01 Jan 2024 00:00:00 +99999999999999999"


def test_retry_after_may_be_a_date_or_nonsense():
    busy = b"HTTP/1.1 503 Busy\r\nretry-after: %s\r\ncontent-length: 0\r\n\r\n"
    for value, expected in (
        (b"Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        (b"soon", None),
        (b"7", 7.0),
        (b"nan", None),
        (DISTANT, None),
    ):
        with raw_server(busy % value) as url:
            failure, _ = ask(url, retries=Retries(attempts_max=1))
            assert failure.retry_after_seconds == expected, value


def test_a_request_that_cannot_be_written_is_one_failed_request():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with raw_server() as url:
        for body in ({"text": "\ud800"}, {"number": 10**5_000}, deep, {"x": object()}):
            failure, _ = ask(url, body=body)
            assert (failure.kind, failure.retryable) == ("client", False)
            assert "cannot be written as JSON" in str(failure)
        while deep:  # the interpreter would recurse
            (deep,) = deep[:1]


def test_the_key_is_sent_and_is_in_no_message(client):
    key = "sk-very-secret"
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                seen.append(connection.recv(65_536))
                body = msgspec.json.encode({"error": {"message": f"Incorrect API key provided: {key}"}})
                connection.sendall(b"HTTP/1.1 401 No\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

        thread = threading.Thread(target=serve)
        thread.start()
        client_url = f"http://127.0.0.1:{listening.getsockname()[1]}/base/"
        failure, _ = ask(client_url, api_key=key, client=client)
        thread.join(10)
    assert b"authorization: Bearer sk-very-secret" in seen[0].replace(b"Authorization", b"authorization")
    assert seen[0].startswith(b"POST /base/inference/v1/generate HTTP/1.1\r\n")
    assert "Incorrect API key provided: ***" in str(failure) and failure.kind == "client"
    assert key not in repr(failure) and key not in repr(HTTPClient("http://h", api_key=key))
    cause: BaseException | None = failure
    while cause is not None:
        assert key not in str(cause)
        cause = cause.__cause__ or cause.__context__


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://h", "http://", "http://h:port", "http://h?x=1", "http://me:secret@h"]
)
def test_a_url_that_cannot_be_used(url):
    with pytest.raises(ConfigError, match="URL") as caught:
        HTTPClient(url)
    assert "secret" not in str(caught.value)


def test_a_key_that_cannot_be_sent():
    for key in ("two\nlines", "a b", "ключ"):
        with pytest.raises(ConfigError, match="API key") as caught:
            HTTPClient("http://h", api_key=key)
        assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"error": "busy"}', "busy"),
        (b'{"message": "no\\n model"}', "no model"),
        (b'{"detail": [{"msg": "missing"}]}', '[{"msg":"missing"}]'),
        (b"plain \xff", "plain \ufffd"),
        (b"", ""),
        (b'{"error": {"message": "\xff"}}', '{"error": {"message": "\ufffd"}}'),
    ],
)
def test_the_servers_own_words(body, words):
    assert message_of_body(body) == words


def test_long_words_are_cut():
    assert len(message_of_body(b"x" * 10_000)) < 600


def test_tls_where_there_is_none(client):
    with raw_server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        failure, _ = ask(url.replace("http:", "https:"), retries=Retries(attempts_max=1), client=client)
        assert failure.kind == "refused" and "no secure connection" in str(failure)


def test_answers_of_one_read_and_of_many_arrive_whole():
    for size in (1, 1_000, 70_000, 300_000):
        body = msgspec.json.encode("x" * size)
        with raw_server(OK % (len(body), body)) as url:
            assert ask(url, reply_type=str)[0] == "x" * size


def test_proxies_and_redirects_are_for_apis_alone(monkeypatch):
    """A server whose generation goes there directly is asked everything directly."""
    moved = b"HTTP/1.1 307 Moved\r\nlocation: %s/there\r\ncontent-length: 0\r\n\r\n"
    monkeypatch.delenv("NO_PROXY", raising=False)
    with raw_server(OK % (15, b'{"choices": []}')) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        monkeypatch.setenv("http_proxy", proxy)
        assert ask("http://far.example", client=ProxyClient)[0] == GenerateReply([])
    with raw_server(
        OK % (15, b'{"choices": []}')
    ) as here:  # the proxy is gone, and a server of this machine needs none
        assert ask(here, client=ProxyClient)[0] == GenerateReply([])
    with raw_server(OK % (15, b'{"choices": []}')) as there:
        assert ask(there)[0] == GenerateReply([])
        monkeypatch.delenv("HTTP_PROXY")
        monkeypatch.delenv("http_proxy")
    with raw_server(OK % (15, b'{"choices": []}')) as there, raw_server(moved % there.encode()) as here:
        assert ask(here, client=ProxyClient)[0] == GenerateReply([])


def test_a_host_that_no_name_server_can_know_is_a_failure(client):
    failure, _ = ask("http://☃.invalid:1", retries=Retries(attempts_max=1), client=client)
    assert failure.kind == "refused" and "no connection" in str(failure)


def test_a_redirect_into_tls_is_verified(monkeypatch):
    """No certificate is looked at before, but the key goes along to the same host."""
    verified = list[Any]()

    class Client(httpx.AsyncClient):
        def __init__(self, **settings: Any) -> None:
            verified.append(settings["verify"])
            super().__init__(**settings)

    monkeypatch.setattr(httpx, "AsyncClient", Client)
    with raw_server(OK % (15, b'{"choices": []}')) as url:
        assert ask(url, client=ProxyClient)[0] == GenerateReply([])
    assert [each.verify_mode for each in verified] == [ssl.CERT_REQUIRED]


@pytest.mark.parametrize("name", ["ALL_PROXY", "SSL_CERT_FILE"])
def test_an_environment_that_no_client_can_be_made_with_is_a_failure(monkeypatch, name):
    http._certificates.cache_clear()
    monkeypatch.setenv(name, "gopher://127.0.0.1:1")
    failure, _ = ask("http://127.0.0.1:1", client=ProxyClient)
    assert (failure.kind, failure.retryable) == ("refused", False) and name in str(failure)
    with raw_server(OK % (15, b'{"choices": []}')) as url:
        assert ask(url)[0] == GenerateReply([])
