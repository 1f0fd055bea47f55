"""A session with an OpenEnv server, over a WebSocket: one environment for each connection.

While a session is open, pings of the server are answered, also while the model generates.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import trio
import trio_websocket

from rollouts.env.background import Background
from rollouts.errors import ServiceLostError, leaves_of
from rollouts_openenv.service import RefusedError

CONNECT_SECONDS, CLOSE_SECONDS = 20.0, 2.0
MESSAGE_BYTES_MAX = 100 * 2**20
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.1, 2.0  # between two tries of a server that has no free session; it doubles
REFUSALS = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # of an action


class Step(NamedTuple):
    """What a reset or a step gives."""

    observation: dict[str, Any]
    reward: Any
    done: bool


class Session:
    """An open connection. A request whose answer did not come ends it: `is_waiting` is then True.

    Raises ServiceLostError if the server is lost, and RefusedError if it refuses a request.
    """

    def __init__(self, connection: trio_websocket.WebSocketConnection, url: str, seconds: float) -> None:
        self._connection, self._url, self._seconds = connection, url, seconds
        self.is_waiting = False

    async def reset(self, arguments: Mapping[str, Any]) -> Step:
        """Begin an episode."""
        return self._step(await self._ask("reset", "observation", arguments))

    async def step(self, action: Mapping[str, Any]) -> Step:
        """Take an action."""
        return self._step(await self._ask("step", "observation", action))

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a tool of MCP, called beside the steps."""
        params = {"name": tool, "arguments": dict(arguments)}
        answer = await self._ask("mcp", "mcp", {"jsonrpc": "2.0", "method": "tools/call", "id": 1, "params": params})
        if isinstance(answer.get("error"), dict):
            raise RefusedError(str(answer["error"].get("message")))
        result = answer.get("result")
        return result if isinstance(result, dict) else {"content": []}

    def _step(self, data: Mapping[str, Any]) -> Step:
        observation, done = data.get("observation"), data.get("done", False)
        if not isinstance(observation, dict) or not isinstance(done, bool):
            raise self._lost(f"it answered {json.dumps(data)[:200]}, which is no observation of OpenEnv")
        return Step(observation, data.get("reward"), done)

    async def _ask(self, kind: str, expected: str, data: Mapping[str, Any]) -> dict[str, Any]:
        if self.is_waiting:
            raise self._lost("an earlier request got no answer")
        self.is_waiting = True
        with trio.move_on_after(self._seconds) as deadline:
            text = await self._exchange(json.dumps({"type": kind, "data": dict(data)}))
        if deadline.cancelled_caught:
            raise self._lost(f"it answered nothing for {self._seconds:g} seconds")
        self.is_waiting = False
        answer = self._read(text)
        found: dict[str, Any] = answer["data"]
        if answer["type"] == "error":
            raise RefusedError(_words(found), str(found.get("code")))
        if answer["type"] != expected:
            raise self._lost(f"it answered a {kind} with a message of the type {answer['type']!r}")
        return found

    async def _exchange(self, message: str) -> str | bytes:
        try:
            with contextlib.suppress(trio_websocket.ConnectionClosed):  # it may have sent its reason before
                await self._connection.send_message(message)
            return await self._connection.get_message()
        except trio_websocket.ConnectionClosed as error:
            why = getattr(error.reason, "reason", None)
            raise self._lost("the connection was closed" + (f": {why}" if why else "")) from error

    def _read(self, text: str | bytes) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            answer = json.loads(text)
            if isinstance(answer, dict) and isinstance(answer.get("data"), dict) and "type" in answer:
                return answer
        raise self._lost(f"it answered {text[:200]!r}, which is no message of OpenEnv")

    def _lost(self, why: str) -> ServiceLostError:
        return ServiceLostError(f"the OpenEnv server {self._url} was lost: {why}")


class Held:
    """A session that is open until `close`. Its methods are to be called in one loop, which answers pings."""

    def __init__(self, url: str, headers: Mapping[str, str], wait_seconds: float, call_seconds: float) -> None:
        self._where = (url, headers, wait_seconds, call_seconds)
        self._found: tuple[Session, Step] | None = None
        self._error: Exception | None = None
        self._ready, self._end, self._ended = trio.Event(), trio.Event(), trio.Event()
        self._scope = trio.CancelScope()

    async def open(self, loop: Background, reset: Mapping[str, Any]) -> tuple[Session, Step]:
        """The session and what its reset gave. Raises ServiceLostError."""
        loop.start(self._serve, reset)
        try:
            await self._ready.wait()
        except trio.Cancelled:
            self._scope.cancel()
            raise
        if self._found is None:
            lost = [leaf for leaf in leaves_of(self._error or OSError()) if isinstance(leaf, ServiceLostError)]
            raise lost[0] if lost else ServiceLostError(f"the OpenEnv server was lost: {self._error!r}")
        return self._found

    async def close(self) -> None:
        """Close the session."""
        self._end.set()
        await self._ended.wait()

    async def _serve(self, reset: Mapping[str, Any]) -> None:
        try:
            with self._scope:
                async with _opened(*self._where, reset) as self._found:
                    self._ready.set()
                    await self._end.wait()
        except Exception as error:  # whatever the connection raises; requests say themselves that it is lost
            self._error = error
        finally:
            self._ready.set()
            self._ended.set()


@contextlib.asynccontextmanager
async def _opened(
    url: str, headers: Mapping[str, str], wait_seconds: float, call_seconds: float, reset: Mapping[str, Any]
) -> AsyncIterator[tuple[Session, Step]]:
    """A session after its reset. A server without a free session is tried again for `wait_seconds`."""
    address = "ws" + url.rstrip("/").removeprefix("http") + "/ws"
    until, pause = trio.current_time() + wait_seconds, PAUSE_SECONDS
    while True:
        async with contextlib.AsyncExitStack() as stack:
            connection = await _connected(stack, address, headers)
            session = Session(connection, url, call_seconds)
            try:
                first = await session.reset(reset)
            except RefusedError as error:
                if error.code != "CAPACITY_REACHED":
                    raise ServiceLostError(f"the OpenEnv server {url} cannot begin an episode: {error}") from error
                if trio.current_time() + pause > until:
                    raise ServiceLostError(
                        f"the OpenEnv server {url} had no free session for {wait_seconds:g} seconds: {error}\n"
                        "let it serve more sessions, or type: --concurrency N"
                    ) from error
            else:
                yield session, first
                return
        await trio.sleep(pause)
        pause = min(2 * pause, PAUSE_SECONDS_MAX)


async def _connected(
    stack: contextlib.AsyncExitStack, address: str, headers: Mapping[str, str]
) -> trio_websocket.WebSocketConnection:
    try:
        connection: trio_websocket.WebSocketConnection = await stack.enter_async_context(
            trio_websocket.open_websocket_url(
                address,
                extra_headers=[(name.encode(), value.encode()) for name, value in headers.items()],
                max_message_size=MESSAGE_BYTES_MAX,
                connect_timeout=CONNECT_SECONDS,
                disconnect_timeout=CLOSE_SECONDS,
            )
        )
    except (OSError, trio_websocket.HandshakeError, trio_websocket.ConnectionTimeout) as error:
        why = f"{type(error).__name__}: {error}"
        raise ServiceLostError(f"the OpenEnv server cannot be reached at {address}: {why}") from error
    return connection


def _words(data: Mapping[str, Any]) -> str:
    """What an error says, with the fields that are wrong."""
    errors = data.get("errors")
    fields = [
        f"{'.'.join(map(str, each.get('loc') or ()))}: {each.get('msg')}"
        for each in (errors if isinstance(errors, list) else [])
        if isinstance(each, dict)
    ]
    return "; ".join([str(data.get("message")), *fields])
