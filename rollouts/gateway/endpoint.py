"""An address for the model of one episode, so that a program with its own client becomes the agent.

    async with model.serve() as endpoint:
        await run_my_agent(endpoint.base_url, endpoint.key)

The address is on this machine only, and its key belongs to this episode. When the block ends, so does the address. A
sandbox with a network of its own cannot reach it; `await endpoint.listen(folder)` opens a Unix socket in a folder that
both see (`relay`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import trio

from rollouts.author_code import shown
from rollouts.gateway.api import API, error_response, unreadable
from rollouts.gateway.exchange import Answer, APIError, mistake_in
from rollouts.gateway.http_server import HTTPLimits, HTTPRequest, HTTPResponse, serve_http
from rollouts.gateway.relay import SOCKET

LIMITS = HTTPLimits(grace_seconds=0.0)
RETRY_COUNT = "x-stainless-retry-count"
REPEATS_MAX = 64
"""How many answers are kept for clients that repeat a request."""


@dataclass(frozen=True)
class Endpoint:
    """Where a client finds the model: `base_url` for clients of OpenAI's APIs, `url` for Anthropic's, and the `key`."""

    url: str
    key: str
    _serve: Callable[[trio.SocketListener], None]

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(self.url.rpartition(":")[2])

    async def listen(self, folder: str) -> None:
        """Also answer at the Unix socket `SOCKET` in this folder of a Linux machine, until the address ends. Raises
        OSError.
        """
        listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            await listener.bind(f"/proc/self/fd/{descriptor}/{SOCKET}")  # short: a socket's path has 107 bytes at most
        except BaseException:
            listener.close()
            raise
        finally:
            os.close(descriptor)
        listener.listen()
        self._serve(trio.SocketListener(listener))

    @property
    def base_url(self) -> str:
        """The base URL of OpenAI's APIs."""
        return f"{self.url}/v1"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables in which the clients of OpenAI and Anthropic look for address and key. A proxy is
        not used for this address.
        """
        known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
        direct = ",".join(filter(None, (known, "127.0.0.1")))
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "NO_PROXY": direct,
            "no_proxy": direct,
        }


@dataclass(eq=False)
class _Repeat:
    """One request that was answered, or will be. `was_lost`: the client left before it had the response."""

    done: trio.Event = field(default_factory=trio.Event)
    response: HTTPResponse | None = None
    was_lost: bool = False


class _Door:
    """Checks keys, answers a repeated request once, and keeps the first failure that ends the episode."""

    def __init__(self, answer: Answer, key: str) -> None:
        self._api, self._key = API(answer, name=None), key
        self._repeats: dict[bytes, _Repeat] = {}  # by a hash of the path and the body
        self.failure: Exception | None = None
        self.scope = trio.CancelScope()

    def admit(self, request: HTTPRequest) -> HTTPResponse | None:
        """The refusal of a request without the key, before its body is read."""
        headers = request.headers
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if secrets.compare_digest(given.strip().encode(), self._key.encode()):
            return None
        words = "this key belongs to no episode at this address; use the OPENAI_API_KEY that this episode has set"
        return error_response(request, APIError(401, words, code="invalid_api_key"))

    async def handle(self, request: HTTPRequest) -> HTTPResponse:
        try:
            return await (self._once(request) if request.method == "POST" else self._api.handle(request))
        except APIError as error:
            return error_response(request, error)
        except Exception as error:  # it ends the episode, or the run
            self.failure = self.failure or error
            self.scope.cancel()
            return error_response(request, APIError(500, "the episode has failed"))

    async def _once(self, request: HTTPRequest) -> HTTPResponse:
        """The response. A client that lost it, and asks again, gets the same one. Raises APIError."""
        is_retry = _is_retry(request)
        place = hashlib.blake2b(request.path.encode() + b"\n" + request.body, digest_size=16).digest()
        known = self._repeats.get(place)
        if known is not None and is_retry:
            await known.done.wait()
        if known is not None and known.response is not None and (known.was_lost or is_retry):
            known.was_lost = False
            return known.response
        repeat = self._repeats[place] = _Repeat()
        if len(self._repeats) > REPEATS_MAX:
            del self._repeats[next(iter(self._repeats))]

        def lost() -> None:
            repeat.was_lost = True

        try:
            response = await self._api.handle(request)
            if response.status == 200:
                repeat.response = response._replace(on_lost=lost)
            return repeat.response or response
        finally:
            repeat.done.set()


def _is_retry(request: HTTPRequest) -> bool:
    """Whether the client says that it sends a request again, as the packages of OpenAI and Anthropic do. Raises
    APIError.
    """
    count = request.headers.get(RETRY_COUNT, "0")
    if not re.fullmatch("[0-9]{1,9}", count):
        raise mistake_in(RETRY_COUNT, f"{RETRY_COUNT} is {shown(count)}; it must be a number")
    return int(count) > 0


@contextlib.asynccontextmanager
async def open_endpoint(answer: Answer) -> AsyncIterator[Endpoint]:
    """Serve `answer` at an address on this machine while the block runs. Requests in flight are cancelled at its end.

    If `answer` raises anything but APIError, the block is cancelled, and this exception is raised at its end.
    """
    (first,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    url, key = f"http://127.0.0.1:{first.socket.getsockname()[1]}", f"rollouts-{secrets.token_urlsafe(24)}"
    door, listeners = _Door(answer, key), list[trio.SocketListener]()
    try:
        async with trio.open_nursery() as nursery:

            def serve(listener: trio.SocketListener) -> None:
                listeners.append(listener)
                nursery.start_soon(serve_http, door.handle, unreadable, [listener], LIMITS, trio.Event(), door.admit)

            door.scope = nursery.cancel_scope
            serve(first)
            yield Endpoint(url, key, serve)
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if door.failure is None or not isinstance(group, ExceptionGroup):
            error = group.exceptions[0] if len(group.exceptions) == 1 else group
            raise error from error.__cause__
    finally:
        for listener in listeners:
            listener.socket.close()
    if door.failure is not None:
        raise door.failure
