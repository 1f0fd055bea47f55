"""A chat-completions API on loopback, whose replies a test writes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JUNK = [
    b"",
    b"<html>busy</html>",
    b"[]",
    b"{}",
    b'{"choices": []}',
    b'{"choices": [{"message": {"content": 3}}]}',
    b'{"choices": null}',
    b"\xff\xfe",
    b"[" * 100_000,
]


class Answer:
    """What the server does with one request: a status and a body, or nothing for ever, or the end of the connection."""

    def __init__(
        self, body: bytes = b"", status: int = 200, *, hangs: bool = False, dies: bool = False, **headers: str
    ):
        self.body, self.status, self.hangs, self.dies, self.headers = body, status, hangs, dies, headers


def said(content: str, tokens: tuple[int, int] | None = (100, 20)) -> Answer:
    """A completion with this text."""
    found: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": content}}]}
    if tokens is not None:
        found["usage"] = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return Answer(json.dumps(found).encode())


def nonce_of(request: dict[str, Any]) -> str:
    """The random id of a request."""
    return re.search(r"BEGIN name (\w+)", request["messages"][0]["content"])[1]


def verdict(request: dict[str, Any], value: Any, **more: Any) -> Answer:
    """The reply of a judge that does as it was asked."""
    return said(json.dumps({"id": nonce_of(request), "reasoning": "as the rubric says", "verdict": value} | more))


class Served:
    """The URL of a server, and the requests that it has received."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self.answer, self.requests, self.keys = answer, [], []
        self.in_flight = self.most_in_flight = 0
        self.lock, self.released = threading.Lock(), threading.Event()
        self.url = ""


@contextmanager
def serving(answer: Callable[[dict[str, Any]], Answer]) -> Iterator[Served]:
    """A server on a free port, which stops at the end."""
    served = Served(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions", self.path
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with served.lock:
                served.requests.append(request)
                served.keys.append(self.headers.get("Authorization"))
                served.in_flight += 1
                served.most_in_flight = max(served.most_in_flight, served.in_flight)
            try:
                self.send(served.answer(request))
            finally:
                with served.lock:
                    served.in_flight -= 1

        def send(self, answer: Answer) -> None:
            if answer.hangs:
                served.released.wait(30)
            if answer.hangs or answer.dies:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        served.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
