"""Workers at an address: the same numbers as inline, and one clear error for each thing that can be wrong."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import forks
import msgspec
import pytest
import trio
from comparing import ENVS, SHORT, logged

import rollouts
from rollouts.cli import main
from rollouts.config.workers import WorkerSettings
from rollouts.env.workers import channel, websocket
from rollouts.env.workers.pool import WorkerLease, WorkerPool
from rollouts.env.workers.protocol import VERSION, Hello
from rollouts.env.workers.websocket import URLConnector
from rollouts.errors import ConfigError, PluginError, WorkerError

trio_websocket = pytest.importorskip("trio_websocket")

ENV = '''\
"""An environment that was made for a test."""

from pathlib import Path


class Holds:
    """Writes what is done."""

    def __init__(self, file: str = "holds.txt") -> None:
        self.file = Path(file)

    def tasks(self, split, rng):
        return ["Say 1."]

    def setup(self, task):
        print("opened")
        self.file.write_text("open")

    def close(self):
        self.file.write_text("closed")
'''


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLOUTS_WORKER_TOKEN", raising=False)


@pytest.fixture
def serve(tmp_path) -> Iterator[Callable[..., tuple[Any, str]]]:
    """serve(name, *flags) -> the server's process, and its URL."""
    started: list[Any] = []
    readers: list[threading.Thread] = []

    def drain(stream: IO[str]) -> None:
        with stream:
            stream.read()

    def start(name: str, *flags: str) -> tuple[Any, str]:
        port = () if "--port" in flags else ("--port", "0")
        command = [sys.executable, "-m", "rollouts", "env", "serve", name, *port, *flags]
        process = forks.popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"serving {name} at ws"), line
        readers.append(threading.Thread(target=drain, args=(process.stdout,)))
        readers[-1].start()
        return process, line.split(" at ")[1].split()[0]

    yield start
    for process in started:
        process.kill()
        process.wait()
    for thread in readers:
        thread.join()


def pool_at(url: str, token: str = "", **settings: Any) -> WorkerPool:
    return WorkerPool("there", URLConnector(url, token=token), WorkerSettings(kind=url, **settings))


@contextlib.contextmanager
def fake_server(handle: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server on loopback that handles each connection with this function."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def handled(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                handle(connection)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=handled, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"ws://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def fake_worker(*messages: bytes) -> Iterator[str]:
    """A WebSocket server that sends these messages to each client."""
    ports: list[int] = []
    ready, over = threading.Event(), threading.Event()

    async def handler(request: Any) -> None:
        connection = await request.accept()
        for message in messages:
            await connection.send_message(message)
        with contextlib.suppress(trio_websocket.ConnectionClosed):
            while True:
                await connection.get_message()

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            server = await nursery.start(trio_websocket.serve_websocket, handler, "127.0.0.1", 0, None)
            ports.append(server.port)
            ready.set()
            await trio.to_thread.run_sync(over.wait)
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(run,))
    thread.start()
    ready.wait()
    yield f"ws://127.0.0.1:{ports[0]}"
    over.set()
    thread.join()


def slowly(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on, late and in small pieces."""
    with contextlib.suppress(OSError):
        while data := source.recv(900):
            time.sleep(0.002)
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@pytest.mark.slow
def test_the_numbers_are_those_of_a_run_without_worker_also_on_a_slow_network(serve, tmp_path):
    Path("token").write_text("a-long-secret-token\n")
    _, url = serve("calculator", "--token-file", "token")

    def relay(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as target:
            back = threading.Thread(target=slowly, args=(target, connection), daemon=True)
            back.start()
            slowly(connection, target)
            back.join()

    rollouts.run(env="calculator", loss="grpo", out="inline", **SHORT)
    with fake_server(relay) as slow:
        worker = {"kind": slow, "token_file": str(tmp_path / "token"), "count": 2}
        rollouts.run(env="calculator", loss="grpo", out="url", worker=worker, **SHORT)
    assert logged("url") == logged("inline")
    written = [file.read_bytes() for file in Path("url").rglob("*") if file.is_file()]
    assert any(slow.encode() in text for text in written)  # the search finds what is there
    assert not any(b"a-long-secret-token" in text for text in written)


def test_what_a_server_refuses(serve, monkeypatch):
    Path("token").write_text("right")
    _, url = serve("calculator", "--token-file", "token", "--count", "1")
    with pytest.raises(ConfigError, match=r"it needs a token; give it with --worker.token-file"):
        rollouts.run(env="calculator", worker=url, **SHORT)
    monkeypatch.setenv("ROLLOUTS_WORKER_TOKEN", "wrong")
    with pytest.raises(ConfigError, match="refuses the connection: the token is wrong"):
        rollouts.run(env="calculator", worker=url, **SHORT)
    first, second = pool_at(url, "right"), pool_at(url, "right")
    assert first.call("describe", {"name": "calculator"}).class_name == "Calculator"
    with pytest.raises(PluginError, match="this worker has the environment 'calculator', and no 'prompts'"):
        first.call("describe", {"name": "prompts"})
    with pytest.raises(WorkerError, match="there are 1 connections already; --count"):
        second.call("describe", {"name": "calculator"})
    first.close()
    page = ["GET / HTTP/1.1", "Host: here", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    page += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Authorization: Bearer right", "Origin: http://a.example"]
    place = "127.0.0.1", int(url.rpartition(":")[2])
    with contextlib.ExitStack() as open_until_the_end:
        halves = [open_until_the_end.enter_context(socket.create_connection(place, 10)) for _ in range(100)]
        halves[0].sendall(b"GET / HTTP/1.1\r\n")
        browser = open_until_the_end.enter_context(socket.create_connection(place, 10))
        browser.sendall("\r\n".join([*page, "", ""]).encode())
        assert browser.recv(4096).startswith(b"HTTP/1.1 403 ")
        assert halves[0].recv(1) == b"", "connections that never say who they are give their places to others"


def test_a_url_that_serves_something_else(monkeypatch):
    monkeypatch.setattr(websocket, "CONNECT_SECONDS", 1.0)

    def web(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope")

    def garbage(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"\x00\xffSSH-2.0-OpenSSH\r\n\r\n" * 20)

    for handle, said in ((web, "it answers with HTTP status 404"), (garbage, "does not answer as a worker")):
        with fake_server(handle) as url, pytest.raises(WorkerError, match=said):
            pool_at(url).call("describe", {"name": "calculator"})
    silent = fake_server(lambda connection: connection.recv(4096) and time.sleep(1.5))
    with silent as url, pytest.raises(WorkerError, match="does not answer as a worker"):
        pool_at(url).call("describe", {"name": "calculator"})
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(WorkerError, match=f"type, on that host: rollouts env serve NAME --port {port}"):
        pool_at(f"ws://127.0.0.1:{port}").call("describe", {"name": "calculator"})


def test_another_protocol(monkeypatch):
    hello = msgspec.json.encode(Hello(VERSION + 1, "9.9"))
    for message, said in ((hello, "install one version of rollouts"), (b'{"a": 1}', "is no worker of rollouts")):
        with fake_worker(message) as url, pytest.raises(WorkerError, match=said):
            pool_at(url).call("describe", {"name": "calculator"})


def test_a_message_that_is_too_big(monkeypatch):
    monkeypatch.setattr(channel, "MESSAGE_BYTES_MAX", 1000)
    hello = msgspec.json.encode(Hello(VERSION))
    with fake_worker(hello, b"x" * 2000) as url, pytest.raises(WorkerError, match="a message is too big"):
        pool_at(url).call("describe", {"name": "calculator"})


@pytest.mark.slow
def test_a_silent_host_and_a_silent_worker_have_different_messages(serve):
    with fake_worker(msgspec.json.encode(Hello(VERSION))) as url:
        pool = pool_at(url, silent_seconds=0.5)
        with pytest.raises(WorkerError, match=rf"was silent for 0.5 seconds .*the server at {url} answers, and its"):
            pool.call("stream")
    _, url = serve("calculator")
    is_frozen = threading.Event()

    def freezing(source: socket.socket, target: socket.socket) -> None:
        while (data := source.recv(900)) and not is_frozen.is_set():
            target.sendall(data)
        is_frozen.wait()

    def relay(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as target:
            threading.Thread(target=freezing, args=(target, connection), daemon=True).start()
            freezing(connection, target)
            over.wait()

    over = threading.Event()
    with fake_server(relay) as slow:
        pool = pool_at(slow, silent_seconds=0.5)
        assert pool.call("describe", {"name": "calculator"}).class_name == "Calculator"
        is_frozen.set()
        with pytest.raises(WorkerError, match=rf"there was silent .*the host at {slow} does not answer: it is"):
            pool.call("more")
        over.set()


@pytest.mark.nightly
def test_limits_of_a_worker_at_an_address_are_set_there(serve):
    with pytest.raises(ConfigError, match=r"type there: rollouts env serve NAME --cpu-seconds 2"):
        rollouts.run(env="calculator", worker={"kind": "ws://127.0.0.1:1", "cpu_seconds": 2}, **SHORT)
    Path("holds.py").write_text(ENV.replace('print("opened")', "while True: pass"))
    _, url = serve("./holds.py:Holds", "--cpu-seconds", "3", "--memory-gib", "8")
    pool, lease = pool_at(url), WorkerLease(is_episode=True)
    pool.call("make", {"name": "./holds.py:Holds", "settings": {"file": "mine.txt"}}, lease=lease)
    with pytest.raises(WorkerError, match=r"its worker ended \(it used more than the 3 CPU seconds"):
        pool.call("setup", {"prompt": "Say 1.", "messages": []}, lease=lease)
    pool.close()


@pytest.mark.nightly
def test_a_server_opens_the_sandbox_that_it_was_started_with(serve):
    given = {**SHORT, "env": f"{ENVS}:Boxed", "steps": 1}
    _, closed = serve(given["env"])
    with pytest.raises(ConfigError, match=r"its server opens none\n.*rollouts env serve .*:Boxed --sandbox subprocess"):
        rollouts.run(worker=closed, **given)
    _, url = serve(given["env"], "--sandbox", "subprocess", "--sandbox.memory-gib", "1")
    with pytest.raises(ConfigError, match=r"type: --sandbox subprocess --sandbox.memory-gib 1"):
        rollouts.run(worker=url, **given)
    sandbox = {"name": "subprocess", "memory_gib": 1.0}
    for out, worker in (("inline", "inline"), ("url", url)):
        rollouts.run(worker=worker, sandbox=sandbox, out=out, **given)
    assert logged("url") == logged("inline") and len(logged("url")) == 1


@pytest.mark.slow
def test_a_server_that_vanishes_loses_only_its_episodes(serve):
    server, url = serve("calculator")
    port = url.rpartition(":")[2]
    done: list[Any] = []
    given = {**SHORT, "steps": 3, "retries": 3, "worker": url, "out": "run"}
    run = threading.Thread(target=lambda: done.append(rollouts.run(env="calculator", loss="grpo", quiet=True, **given)))
    run.start()
    while not (Path("run/metrics.jsonl").exists() and '"step": 1' in Path("run/metrics.jsonl").read_text()):
        assert run.is_alive()
        time.sleep(0.02)
    server.kill()
    server.wait()
    serve("calculator", "--port", port)
    run.join()
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 3
    steps = [line["step"] for line in logged("run") if "reward/mean" in line]
    assert steps == sorted(set(steps)) and len(steps) == 3


@pytest.mark.parametrize("how", ["server", "client"])
def test_the_end_of_a_server_or_a_run_closes_the_episodes(how, serve):
    Path("holds.py").write_text(ENV)
    server, url = serve("./holds.py:Holds")
    pool, lease = pool_at(url), WorkerLease(is_episode=True)
    make = {"name": "./holds.py:Holds", "settings": {"file": "mine.txt"}}
    pool.call("make", make, lease=lease)
    pool.call("setup", {"prompt": "Say 1.", "messages": []}, lease=lease)
    assert Path("mine.txt").read_text() == "open"
    if how == "server":
        server.send_signal(signal.SIGINT)
        assert server.wait() == 0
        assert Path("mine.txt").read_text() == "closed"
        with pytest.raises(WorkerError):
            pool.call("setup", {"prompt": "Say 1.", "messages": []}, lease=lease)
    else:
        pool.close()
        while Path("mine.txt").read_text() != "closed":
            assert server.poll() is None
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host", "0.0.0.0"], "give a token: --token-file FILE"),
        (["--host", "0.0.0.0", "--token-file", "token"], "--certificate FILE --key FILE; or type --insecure"),
        (["--token-file", "none"], "--token-file none cannot be read"),
        (["--token-file", "empty"], "expected one line with a token"),
        (["--key", "token"], "give its certificate too"),
        (["--sandbox.memory-gib", "1"], "--sandbox.memory-gib: name the sandbox too: --sandbox NAME"),
        (["--sandbox", "subprocess", "--sandbox.memory-gb", "1"], "did you mean: --sandbox.memory-gib"),
        (["--env.digits", "3"], "--env.digits: runs choose it; leave it out here"),
        (["--certificate", "token", "--key", "token"], "cannot be used"),
    ],
)
def test_what_is_not_served(flags, said, capsys):
    Path("token").write_text("right")
    Path("empty").write_text("\n")
    assert main(["env", "serve", "calculator", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_a_port_that_is_taken_and_an_environment_that_is_not_there(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["env", "serve", "calculator", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be used" in capsys.readouterr().err
    assert main(["env", "serve", "calculador"]) == 2
    assert "did you mean: calculator" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ws://user:secret@127.0.0.1:1", "ws://", "ws://127.0.0.1:port"])
def test_addresses_that_are_refused(url):
    with pytest.raises(ConfigError) as caught:
        rollouts.run(env="calculator", worker=url, **SHORT)
    assert "secret" not in str(caught.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="it makes the certificate")
def test_tls(serve):
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*command, "-keyout", "key.pem", "-out", "cert.pem", *subject], check=True, capture_output=True)
    _, url = serve("calculator", "--certificate", "cert.pem", "--key", "key.pem")
    assert url.startswith("wss://")
    with pytest.raises(WorkerError, match=r"is not trusted.*\n.*--worker.certificate FILE"):
        pool_at(url).call("describe", {"name": "calculator"})
    with pytest.raises(WorkerError, match="speaks another protocol, or TLS"):
        pool_at(url.replace("wss", "ws")).call("describe", {"name": "calculator"})
    pool = WorkerPool("there", URLConnector(url, certificate="cert.pem"), WorkerSettings())
    assert pool.call("describe", {"name": "calculator"}).class_name == "Calculator"
    pool.close()


def test_a_worker_that_is_killed_is_named(serve):
    Path("holds.py").write_text(ENV.replace('self.file.write_text("open")', "__import__('os')._exit(7)"))
    _, url = serve("./holds.py:Holds")
    pool, lease = pool_at(url), WorkerLease(is_episode=True)
    pool.call("make", {"name": "./holds.py:Holds", "settings": {"file": "mine.txt"}}, lease=lease)
    with pytest.raises(WorkerError, match=r"its worker ended \(exit code 7"):
        pool.call("setup", {"prompt": "Say 1.", "messages": []}, lease=lease)
    pool.close()
