"""Open sessions with MCP servers, in a trio loop and a thread of their own.

A session is opened and closed in one task of that loop, as the client of `mcp` needs it, while an episode opens, uses
and closes its session in separate calls. What goes wrong in a connection stays in its task.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import trio

from rollouts.env.background import Background
from rollouts.errors import ServiceLostError, named

if TYPE_CHECKING:
    from mcp import Client

PAGES_MAX = 100  # of the list of tools
RESULT_BYTES_MAX = 64 * 2**20  # over HTTP; a larger result ends the session
STDERR_CHARACTERS = 500  # of what a command wrote to stderr, in an error


class Server(NamedTuple):
    """How to reach a server: by a command (its words), or by a URL.

    `env` are environment variables of the command, besides a few such as PATH and HOME. `seconds` is the deadline for
    opening a session.
    """

    label: str
    command: tuple[str, ...] = ()
    url: str = ""
    transport: str = "http"
    env: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    cwd: str = ""
    seconds: float = 60.0


class Host:
    """The loop in which sessions live. Its methods are to be called in that loop (`loop.run`)."""

    def __init__(self, loop: Background) -> None:
        self.loop = loop
        self._shared, self._opening = dict[Server, Session](), trio.Lock()

    async def open(self, server: Server) -> Session:
        """A new session. Raises ServiceLostError."""
        session = Session(server)
        self.loop.start(session.serve)
        try:
            await session.wait_open()
        except BaseException:
            session.end()
            raise
        return session

    async def open_shared(self, server: Server) -> Session:
        """The session that all episodes share; a new one if it was lost."""
        async with self._opening:
            found = self._shared.get(server)
            if found is None or found.is_over:
                found = self._shared[server] = await self.open(server)
            return found


class Session:
    """A session with a server. All methods but `end` are to be called in the loop of its host."""

    def __init__(self, server: Server) -> None:
        self.server, self.tools = server, list[Any]()
        self.is_over = False
        self._client: Client | None = None
        self._opened, self._end, self._ended = trio.Event(), trio.Event(), trio.Event()
        self._calls = set[trio.CancelScope]()
        self._why = ""

    async def serve(self) -> None:
        """Open the session, and keep it open until `end`. A failure is what `wait_open` and calls raise."""
        with tempfile.TemporaryFile("w+", errors="replace") as stderr:
            try:
                with trio.CancelScope(deadline=trio.current_time() + self.server.seconds) as scope:
                    async with _client(self.server, stderr) as client:
                        self._client, self.tools = client, await _all_tools(client)
                        scope.deadline = math.inf
                        self._opened.set()
                        await self._end.wait()
                if scope.cancelled_caught and not self._opened.is_set():
                    self._why = f"it did not open a session in {self.server.seconds:g} seconds"
            except Exception as error:  # whatever the connection raises ends this session, and no other
                self._why = named(error)
            finally:
                self.is_over = True
                self._why += _said(stderr) if self._why else ""
                self._opened.set()
                for call in self._calls:
                    call.cancel()
                self._ended.set()

    async def wait_open(self) -> None:
        """Wait until the session is open. Raises ServiceLostError."""
        await self._opened.wait()
        if self.is_over:
            raise self._lost(self._why)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The `CallToolResult` of a call. Raises ServiceLostError if the session is lost, and ValueError if the server
        refuses the call.
        """
        from mcp import MCPError
        from pydantic import ValidationError

        if self._client is None or self.is_over:
            raise self._lost(self._why)
        with trio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                return await self._client.call_tool(name, arguments)
            except MCPError as error:
                if _is_lost(error):
                    self.end()
                    raise self._lost(error.message) from error
                raise ValueError(error.message) from error
            except ValidationError as error:
                raise self._lost(f"it answered what the protocol does not allow: {named(error)}") from error
            finally:
                self._calls.discard(scope)
        raise self._lost(self._why)

    def end(self) -> None:
        """End the session; `serve` closes the connection, and a command is stopped. From now on it is over, so that the
        next episode that shares it opens another.
        """
        self.is_over = True
        self._end.set()

    async def close(self) -> None:
        """End the session, and wait until it is closed."""
        self.end()
        await self._ended.wait()

    def _lost(self, why: str) -> ServiceLostError:
        return ServiceLostError(f"the MCP server {self.server.label} was lost: {why or 'the connection was closed'}")


@contextlib.asynccontextmanager
async def _client(server: Server, stderr: TextIO) -> AsyncIterator[Client]:
    """A connected client of `mcp`."""
    import httpx2
    from mcp import Client, StdioServerParameters
    from mcp.client.sse import sse_client
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    async with contextlib.AsyncExitStack() as stack:
        if server.command:
            program, *args = server.command
            cwd = server.cwd or None
            transport: Any = stdio_client(
                StdioServerParameters(command=program, args=args, env=dict(server.env), cwd=cwd), errlog=stderr
            )
        elif server.transport == "sse":
            transport = sse_client(server.url, headers=dict(server.headers))
        else:
            http = httpx2.AsyncClient(headers=dict(server.headers), timeout=httpx2.Timeout(30.0, read=None))
            transport = streamable_http_client(
                server.url, http_client=await stack.enter_async_context(http), max_sse_event_size=RESULT_BYTES_MAX
            )
        yield await stack.enter_async_context(Client(transport, cache=None))


async def _all_tools(client: Client) -> list[Any]:
    """The tools of the server; none if it offers none."""
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(PAGES_MAX if client.server_capabilities.tools is not None else 0):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return found


def _is_lost(error: Any) -> bool:
    """Whether an error says that the session is lost, and not that the server refuses the call."""
    from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST

    # The client makes the last two of them out of a response with an HTTP status.
    made = ((INVALID_REQUEST, "Session terminated"), (INTERNAL_ERROR, "Server returned an error response"))
    return error.code == CONNECTION_CLOSED or (error.code, error.message) in made


def _said(stderr: TextIO) -> str:
    """The end of what the command wrote to stderr."""
    stderr.seek(0)
    text = stderr.read().strip()[-STDERR_CHARACTERS:].strip()
    return f"; it wrote: {text}" if text else ""
