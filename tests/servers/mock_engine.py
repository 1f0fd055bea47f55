"""A model server that is none: it answers after a fixed time, in vLLM's token-in-token-out shape, or misbehaves.

    with started(faults={"hang": 0.05, "429": 0.1}) as server:      # another process, a free loopback port
        ... server.url ... server.statistics()["requests"]

    python tests/servers/mock_engine.py --port 8000 --fault 500=0.2

`POST /inference/v1/generate` answers with the ids of `call` while fewer than `calls` of those stand in the prompt,
then with the ids of `answer`: stateless, so a request that is sent again, or that carries on a partial one elsewhere,
gets what the first would have got. `POST /v1/chat/completions` does the same in OpenAI's shape, with `call_name`
called; `GET /chats` gives every body that was asked there. The prompt is never decoded (its bytes are searched), and
answers are made beforehand: the server must cost little beside the client that is measured. `GET /health`, `/version`,
`/v1/models` and `/statistics` are never harmed.

Faults, each at its own rate of the generate requests, drawn from a seed: `hang` (no answer, ever), `stall` (half of
one), `garbage` (no JSON, with status 200), `close` (the connection closes without a word), `cut` (it closes in the
middle of an answer), `429` (with Retry-After), `500`, `400` (with an error of vLLM's). The process ends with its
standard input, so also where its parent is killed. What is left out: everything that a model does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

FAULTS = ("hang", "stall", "garbage", "close", "cut", "429", "500", "400")
GENERATE, CHAT, HEALTH, STATISTICS = "/inference/v1/generate", "/v1/chat/completions", "/health", "/statistics"
# What a client asks before anything else; the rest of what vLLM has is not found.
GREETINGS = {
    "/version": b'{"version":"0.32.0"}',
    "/v1/models": b'{"object":"list","data":[{"id":"policy","object":"model","parent":null,"max_model_len":32768}]}',
}
CHATS = "/chats"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
REQUEST_ID = re.compile(rb'"request_id": ?"([^"]*)"')
REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    429: "Too Many Requests",
    500: "Internal Server Error",
}
DEFAULT_CALL, DEFAULT_ANSWER = tuple(range(20, 36)), tuple(range(40, 46))


class Options(NamedTuple):
    """What the server answers, when, and how often not."""

    call: Sequence[int] = DEFAULT_CALL
    answer: Sequence[int] = DEFAULT_ANSWER
    calls: int = 3
    delay_seconds: float = 0.05
    faults: Mapping[str, float] = {}
    seed: int = 0
    retry_after_seconds: float = 0.05
    chunked: bool = False
    closing: bool = False  # close each connection after its answer
    idle_seconds: float = 0.0  # close a connection that idled so long; 0: never
    call_name: str = "add"
    call_arguments: str = '{"a": 12, "b": 34}'
    answer_text: str = "The sum is 46."
    chat_body: str = ""  # what `/v1/chat/completions` answers, whatever it is asked
    chat_status: int = 200
    api_key: str = ""  # without it, 401


# --- the client's end: start it, ask it, end it ----------------------------------------------------------------------


class MockServer(NamedTuple):
    """A running server: its base URL and its process."""

    url: str
    process: subprocess.Popen[str]

    def statistics(self) -> dict[str, Any]:
        """Its counts: requests, answered, abandoned, faults, connections (now, most, ever), cpu_seconds."""
        found: dict[str, Any] = self._get(STATISTICS)
        return found

    def chats(self) -> list[dict[str, Any]]:
        """The bodies of all requests for a chat completion."""
        found: list[dict[str, Any]] = self._get(CHATS)
        return found

    def _get(self, path: str) -> Any:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())


@contextlib.contextmanager
def started(**options: Any) -> Iterator[MockServer]:
    """A server with these `Options` in a process of its own; it is gone when the block ends, or this process does."""
    command = [sys.executable, str(Path(__file__).resolve()), "--options", json.dumps(options)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the mock server ended with {process.wait(10)} before it listened")
        yield MockServer(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


# --- the server ------------------------------------------------------------------------------------------------------


class _Server:
    """What all connections share."""

    def __init__(self, options: Options) -> None:
        unknown = set(options.faults) - set(FAULTS)
        assert not unknown, f"unknown faults {sorted(unknown)}; known are {', '.join(FAULTS)}"
        assert sum(options.faults.values()) <= 1, options.faults
        self.options = options
        self.counts: Counter[str] = Counter()
        self.chats: list[Any] = []
        self.open = self.open_max = 0
        self.in_flight = self.in_flight_max = 0
        self.loop = asyncio.get_running_loop()
        self._rng = random.Random(options.seed)
        self.marker = json.dumps(list(options.call), separators=(",", ":"))[1:-1].encode()
        self.call, self.answer = _choices(options.call), _choices(options.answer)

    def fault(self) -> str | None:
        """What becomes of this request."""
        if not self.options.faults:
            return None
        drawn = self._rng.random()
        for name, rate in self.options.faults.items():
            drawn -= rate
            if drawn < 0:
                return name
        return None

    def answer_to(self, path: str, body: bytes) -> bytes:
        """The whole answer: the next of the script after what stands in the prompt."""
        if path == CHAT:
            self.chats.append(json.loads(body))
            if self.options.chat_body:
                return self.options.chat_body.encode()
            return self._chat_reply(body.replace(b" ", b"").count(b'"role":"tool"'))
        start = body.find(b'"token_ids":') + len(b'"token_ids":')
        prompt = body[start : body.find(b"]", start) + 1].replace(b" ", b"")
        said = self.call if prompt.count(self.marker) < self.options.calls else self.answer
        name = REQUEST_ID.search(body)
        identifier = name.group(1) if name else b""
        length = prompt.count(b",") + 1
        usage = b'"usage":{"prompt_tokens":%d}' % length
        if b'"prompt_logprobs":' in body:
            each = b",".join(b'{"%s":{"logprob":-0.25}}' % token for token in prompt[1:-1].split(b",")[1:])
            usage += b',"prompt_logprobs":[null%s]' % (b"," + each if each else b"")
        return b'{"request_id":"generate-tokens-%s","prompt_token_ids":%s,%s,%s}' % (identifier, prompt, said, usage)

    def _chat_reply(self, calls: int) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": self.options.answer_text}
        said = self.options.answer
        if calls < self.options.calls:
            function = {"name": self.options.call_name, "arguments": self.options.call_arguments}
            called = {"id": f"call_{calls}", "type": "function", "function": function}
            message, said = {"role": "assistant", "content": None, "tool_calls": [called]}, self.options.call
        content = [{"token": f"t{t}", "bytes": None, "logprob": -0.5, "top_logprobs": []} for t in said]
        finish = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": {"content": content}}
        usage = {"prompt_tokens": 100, "completion_tokens": len(said), "total_tokens": 100 + len(said)}
        reply = {"id": "chat-1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
        return json.dumps({**reply, "usage": usage}).encode()

    def statistics(self) -> bytes:
        found = {"open": self.open, "open_max": self.open_max, "opened": self.counts["opened"]}
        found |= {"requests": self.counts["requests"], "answered": self.counts["answered"]}
        found |= {"in_flight": self.in_flight, "in_flight_max": self.in_flight_max}
        found |= {"abandoned": self.counts["abandoned"]}
        faults = {name: self.counts[name] for name in FAULTS if self.counts[name]}
        return json.dumps({**found, "faults": faults, "cpu_seconds": time.process_time()}).encode()


def _choices(ids: Sequence[int]) -> bytes:
    content = [
        {
            "token_id": t,
            "logprob": -0.5 - i / 64,
            "rank": 1,
            "top_logprobs": [{"token_id": t, "logprob": -0.5 - i / 64}],
        }
        for i, t in enumerate(ids)
    ]
    choice = {"index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": list(ids)}
    choice["weight_versions"] = [{"version": "default", "start": 0, "end": len(ids)}]
    return json.dumps({"choices": [{**choice, "logprobs": {"content": content}}]}, separators=(",", ":"))[1:-1].encode()


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, server: _Server) -> None:
        self.server = server
        self.buffer = b""
        self.timer: asyncio.TimerHandle | None = None
        self.is_busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.counts["opened"] += 1
        self.server.open += 1
        self.server.open_max = max(self.server.open_max, self.server.open)

    def connection_lost(self, _: Exception | None) -> None:
        self.server.open -= 1
        if self.timer is not None:
            self.timer.cancel()
        if self.is_busy:
            self._done("abandoned")

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        found = LENGTH.search(self.buffer, 0, end + 2)
        total = end + 4 + (int(found.group(1)) if found else 0)
        if len(self.buffer) < total:
            return
        path = self.buffer[: self.buffer.find(b"\r\n")].split(b" ")[1].decode()
        head, body, self.buffer = self.buffer[:end], self.buffer[end + 4 : total], self.buffer[total:]
        key = f"authorization: bearer {self.server.options.api_key}".encode().lower()
        if self.server.options.api_key and key not in head.lower():
            self._send(401, b'{"error":{"message":"Incorrect API key provided"}}')
        elif path == CHATS:
            self._send(200, json.dumps(self.server.chats).encode())
        elif path in (GENERATE, CHAT):
            self._generate(path, body)
        elif path == STATISTICS:
            self._send(200, self.server.statistics())
        elif path == HEALTH:
            self._send(200, b"")
        elif path in GREETINGS:
            self._send(200, GREETINGS[path])
        else:
            self._send(404, b'{"error":{"message":"Not Found","type":"NotFoundError","param":null,"code":404}}')

    def _generate(self, path: str, body: bytes) -> None:
        server = self.server
        server.counts["requests"] += 1
        server.in_flight += 1
        server.in_flight_max = max(server.in_flight_max, server.in_flight)
        self.is_busy = True
        if self.timer is not None:
            self.timer.cancel()  # it idles no more
        self.timer = server.loop.call_later(server.options.delay_seconds, self._reply, path, body, server.fault())

    def _reply(self, path: str, body: bytes, fault: str | None) -> None:
        self.timer = None
        answer = self.server.answer_to(path, body)
        self.server.counts[fault or "answered"] += 1
        if fault == "hang":
            return  # busy for ever, until the client leaves
        if fault in ("stall", "cut"):
            whole = _response(200, answer)
            self.transport.write(whole[: len(whole) // 2])
            if fault == "stall":
                return  # as above
            self.transport.close()
        elif fault == "close":
            self.transport.abort()
        elif fault == "garbage":
            self._send(200, b'<html>a proxy says "hello"</html>')
        elif fault == "429":
            after = b"retry-after: %g\r\n" % self.server.options.retry_after_seconds
            self._send(429, b'{"error":{"message":"too many requests"}}', after)
        elif fault == "500":
            self._send(500, b"Internal Server Error")
        elif fault == "400":
            self._send(400, b'{"error":{"message":"the prompt is too long","type":"BadRequestError","code":400}}')
        else:
            self._send(self.server.options.chat_status if path == CHAT else 200, answer)
        self._done(None)

    def _done(self, count: str | None) -> None:
        self.is_busy = False
        self.server.in_flight -= 1
        if count:
            self.server.counts[count] += 1

    def _send(self, status: int, body: bytes, headers: bytes = b"") -> None:
        if self.server.options.closing:
            headers += b"connection: close\r\n"
        self.transport.write(_response(status, body, headers, self.server.options.chunked))
        if self.server.options.closing:
            self.transport.close()
        elif self.server.options.idle_seconds:
            self.timer = self.server.loop.call_later(self.server.options.idle_seconds, self.transport.close)


def _response(status: int, body: bytes, headers: bytes = b"", chunked: bool = False) -> bytes:
    line = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n" % (status, REASONS[status].encode())
    if chunked:
        half = len(body) // 2
        parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:]) if part)
        return line + headers + b"transfer-encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n"
    return line + headers + b"content-length: %d\r\n\r\n%s" % (len(body), body)


async def _serve(options: Options, port: int) -> None:
    """Serve until standard input ends."""
    server = _Server(options)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    listening = await loop.create_server(lambda: _Connection(server), "127.0.0.1", port, backlog=4096)
    loop.add_reader(sys.stdin, lambda: sys.stdin.buffer.raw.read(1024) or ended.set())
    print(listening.sockets[0].getsockname()[1], flush=True)
    await ended.wait()
    listening.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve on a port (0: a free one, printed) until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fault", action="append", default=[], metavar="NAME=RATE", help=f"one of {', '.join(FAULTS)}")
    parser.add_argument("--options", default="{}", help="the fields of Options as JSON")
    arguments = parser.parse_args(argv)
    given = json.loads(arguments.options)
    faults = {name: float(rate) for name, _, rate in (each.partition("=") for each in arguments.fault)}
    given["faults"] = {**given.get("faults", {}), **faults}
    asyncio.run(_serve(Options(**given), arguments.port))


if __name__ == "__main__":
    main()
