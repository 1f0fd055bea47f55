"""A contract fake of vLLM 0.32 and SGLang 0.5.23: their token endpoints, adapters, reloads, pauses, caches and errors.

    with started("vllm", folder, token_seconds=0.01) as server:       # a process of its own, a free loopback port
        server.url ... server.plant("drop_tensor") ... server.statistics()["planted"] ... server.kill()

    python tests/servers/fake_engines.py --kind sglang --model FOLDER --port 0 --fault flip_bit

Flags are the real ones where there is a real one (others are taken and ignored), and missing ones have the real
effect: without --enable-scale-out the token endpoint answers 403. `started` gives them all, unless its options say
otherwise. It answers with real numbers (`fake_model.py`), so that whatever is stale, dropped or flipped shows.

The nasty parts, all as seen: vLLM's reload keeps the prefix cache, and on a bad path leaves /health at 200 and dies of
the next request; an adapter loaded again from the same path keeps its cached blocks; a reset of the cache is refused
with status 200 while requests run; unknown sampling keys are ignored; a request to abort is named with its prefix, and
no name at all aborts everything. SGLang dies of an id outside the vocabulary and of a corrupt file, evicts adapters
without a word and takes them up again from their folder, aborts every request whose name begins as the given one, and
answers n > 1 with a list. Logprobs of prompts are of temperature 1 with both.

Faults (`--fault`, or planted later): drop_tensor[=NAME], flip_bit[=NAME] (in memory, after a load), old_version (200
and the new version, and nothing loaded), adapter_not_loaded (the same, and the base answers), no_flush (caches are
neither reset nor set apart by salts or adapters), other_tokenizer, other_model, die_in_load, die_after=N (generate
requests: it dies in the middle of the Nth), dead_engine (/health 200, and no request ever ends), slow_load=SECONDS.
GET /fake/statistics counts, POST /fake/faults {"faults": [...]} plants, POST /fake/reset begins anew (`FakeServers`
uses servers again that way). Left out: streams, text, stop strings, chat, weights over torch.distributed, memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import forks  # noqa: E402
from fake_core import FAULTS, Core, Options  # noqa: E402
from fake_model import FakeTrainer, write_model  # noqa: E402
from fake_sglang import SGLang  # noqa: E402
from fake_speech import VERSIONS, Speech  # noqa: E402
from fake_vllm import VLLM  # noqa: E402

__all__ = ["FakeServer", "FakeServers", "FakeTrainer", "started", "write_model"]

REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 500: "Server Error"}


# --- the client's end: start it, ask it, end it ----------------------------------------------------------------------


class FakeServer(NamedTuple):
    """A running server: its base URL and its process."""

    url: str
    process: subprocess.Popen[str]

    def statistics(self) -> dict[str, Any]:
        """Its counts: requests by path, running, planted (what a fault hit), loads, cached blocks, version."""
        found: dict[str, Any] = self.ask("GET", "/fake/statistics")[1]
        return found

    def reset(self, kind: str, model: str | Path, **options: Any) -> None:
        """As if it were started anew, which takes a tenth of a second and more."""
        status, reply = self.ask("POST", "/fake/reset", Options(kind, str(model), **options)._asdict())
        assert status == 200, reply

    def plant(self, *faults: str) -> None:
        """These faults from now on, and no others."""
        status, reply = self.ask("POST", "/fake/faults", {"faults": faults})
        assert status == 200, reply

    def ask(self, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        """One request, with status and decoded answer; for tests, which may block."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            data = reply.read()
            is_json = "json" in (reply.getheader("content-type") or "") and bool(data)
            return reply.status, json.loads(data) if is_json else data.decode()

    def kill(self) -> None:
        """As a machine that goes away."""
        self.process.kill()
        self.process.wait(10)

    def has_died(self, seconds: float = 5.0) -> bool:
        """Whether it ends by itself within so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.poll() is not None


@contextlib.contextmanager
def started(kind: str, model: str | Path, **options: Any) -> Iterator[FakeServer]:
    """A server with these `Options` in a process of its own; it is gone when the block ends, or this process does."""
    chosen = Options(kind, str(model), **options)
    command = [sys.executable, str(Path(__file__).resolve()), "--options", json.dumps(chosen._asdict())]
    begin = forks.popen if chosen.numbers == "transformers" else subprocess.Popen
    process = begin(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the fake server ended with {process.wait(10)} before it listened")
        yield FakeServer(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


class FakeServers:
    """Servers that are used again, one test after another: each is as new, and those that died are replaced.

    with FakeServers() as servers, servers.take("vllm", folder, token_seconds=0.01) as server: ...
    """

    def __init__(self) -> None:
        self._idle: list[FakeServer] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def take(self, kind: str, model: str | Path, **options: Any) -> Iterator[FakeServer]:
        """One of its own until the block ends."""
        server = None
        while self._idle and server is None:
            server = self._idle.pop()
            try:
                server.reset(kind, model, **options)
            except OSError:  # it has died since
                server = None
        server = server or self._stack.enter_context(started(kind, model, **options))
        yield server
        self._idle.append(server)  # but not what a failed test leaves behind


# --- the server: HTTP ------------------------------------------------------------------------------------------------


class _Server:
    """What all connections share."""

    def __init__(self, options: Options) -> None:
        self.start(options)

    def start(self, options: Options) -> None:
        """Begin, or begin again."""
        core = Core(options)
        self.dialect: Speech = VLLM(core) if options.kind == "vllm" else SGLang(core)

    async def answer(self, method: str, target: str, body: bytes, key: str) -> tuple[int, Any]:
        """Status, and what is to be encoded."""
        if target != "/fake/reset":
            return await self.dialect.answer(method, target, body, key)
        self.dialect.core.abort(lambda _: True)
        self.start(Options(**json.loads(body)))
        return 200, None


class _Connection(asyncio.Protocol):
    """One connection, one request at a time; a client that leaves is not worked for."""

    def __init__(self, server: _Server) -> None:
        self.server = server
        self.buffer = b""
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, mark, rest = self.buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        body, self.buffer = rest[:length], rest[length:]
        method, target, _ = first.split(" ")
        key = headers.get("authorization", "").removeprefix("Bearer ")
        self.task = asyncio.get_running_loop().create_task(self._answer(method, target, body, key))

    async def _answer(self, method: str, target: str, body: bytes, key: str) -> None:
        status, answer = await self.server.answer(method, target, body, key)
        is_text = answer is None or isinstance(answer, str)
        data = (answer or "").encode() if is_text else json.dumps(answer).encode()
        kind = "text/plain" if is_text else "application/json"
        head = f"HTTP/1.1 {status} {REASONS.get(status, 'Oh')}\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}"
        self.transport.write(head.encode() + b"\r\n\r\n" + data)


async def _serve(options: Options, ends_with_input: bool) -> None:
    """Serve, until standard input ends where that is wanted."""
    server = _Server(options)
    await asyncio.sleep(options.start_seconds)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    listening = await loop.create_server(lambda: _Connection(server), "127.0.0.1", options.port, backlog=1024)
    if ends_with_input:
        loop.add_reader(sys.stdin, lambda: sys.stdin.buffer.raw.read(1024) or ended.set())  # type: ignore[attr-defined]
    print(listening.sockets[0].getsockname()[1], flush=True)
    await ended.wait()


def _read_flags(argv: Sequence[str] | None) -> tuple[Options, bool]:
    """The options, and whether to end with standard input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--options", help="the fields of Options as JSON, instead of flags; ends with standard input")
    parser.add_argument("--kind", choices=sorted(VERSIONS), default="vllm")
    parser.add_argument("--model", "--model-path", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--served-model-name", default="")
    parser.add_argument("--max-model-len", "--context-length", type=int, default=0)
    parser.add_argument("--enable-scale-out", action="store_true")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--max-loaded-loras", "--max-cpu-loras", type=int, default=4)
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--weight-transfer-config", default="")
    parser.add_argument("--api-key", default=os.environ.get("VLLM_API_KEY", ""))
    parser.add_argument("--fake-version", default="")
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--start-seconds", type=float, default=0.0)
    parser.add_argument("--fault", action="append", default=[], help=f"one of {', '.join(FAULTS)}")
    given, _ = parser.parse_known_args(argv)
    if given.options:
        return Options(**json.loads(given.options)), True
    is_sglang = given.kind == "sglang"
    options = Options(
        given.kind,
        given.model,
        served_model=given.served_model_name or given.model,
        context=given.max_model_len,
        port=given.port,
        scale_out=given.enable_scale_out,
        dev_mode=is_sglang or os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        runtime_lora=is_sglang or os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true"),
        weight_transfer=bool(given.weight_transfer_config),
        lora_rank=given.max_lora_rank if given.enable_lora else 0,
        loaded_loras=given.max_loaded_loras,
        logprobs_mode=given.logprobs_mode,
        api_key=given.api_key,
        version=given.fake_version,
        token_seconds=given.token_seconds,
        load_seconds=given.load_seconds,
        start_seconds=given.start_seconds,
        faults=given.fault,
    )
    return options, False


def main(argv: Sequence[str] | None = None) -> None:
    """Serve on a port (0: a free one, printed)."""
    options, ends_with_input = _read_flags(argv)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options, ends_with_input))


if __name__ == "__main__":
    main()
