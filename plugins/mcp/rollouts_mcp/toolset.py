"""The tools of an MCP server as tools of any environment.

An object belongs to an episode, as an environment does: `setup` opens its session, and `close` closes it. The methods
may also be used, or inherited, by an environment of your own.
"""

from __future__ import annotations

import functools
import shlex
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from rollouts import Task, Tool
from rollouts.env.background import background
from rollouts.env.json_schemas import plain_names, plain_schema
from rollouts.errors import ConfigError, EnvironmentDefinitionError, suggestion
from rollouts_mcp.results import text_of

if TYPE_CHECKING:
    from rollouts_mcp.sessions import Host, Server, Session

Seconds = Annotated[float, msgspec.Meta(gt=0)]


@dataclass
class MCP:
    """The tools of an MCP server."""

    async_library: ClassVar[str] = "trio"

    server: str | list[str] = ""  # a command such as `npx -y NAME`, also as a list of words, or a URL
    share: bool = False  # all episodes of the process use one session; else each has its own
    only: list[str] = field(default_factory=list)  # the server's tools that are offered; empty: all
    prefix: str = ""  # is put before the name of each tool
    call_seconds: Seconds = 30.0  # the deadline of a call
    open_seconds: Seconds = 60.0  # the deadline for opening a session
    env: dict[str, str] = field(default_factory=dict)  # environment variables of the command
    cwd: str = ""  # the folder in which the command runs
    headers: dict[str, str] = field(default_factory=dict)  # HTTP headers for a URL
    transport: Literal["http", "sse"] = "http"  # how a URL is spoken to; sse: servers from before 2025

    def __post_init__(self) -> None:
        self._server = self._read_server()
        self._host: Host | None = None
        self._session: Session | None = None

    async def shared(self) -> AsyncIterator[Host]:
        """The loop in which the sessions of the process live."""
        from rollouts_mcp.sessions import Host

        async with background() as loop:
            yield Host(loop)

    async def setup(self, task: Task, shared: Host) -> None:
        """Open the session of the episode. Raises ServiceLostError."""
        self._host = shared
        open_session = shared.open_shared if self.share else shared.open
        self._session = await shared.loop.run(open_session, self._server)

    def tools(self, task: Task) -> list[Tool]:
        """The server's tools. Raises EnvironmentDefinitionError if it lacks one of `only`, or has none."""
        assert self._session is not None, "setup has run"
        known = {each.name: each for each in self._session.tools}
        for name in self.only or known or ("",):
            if name not in known:
                has = f"has the tools {', '.join(known)}" if known else "has no tools"
                near = suggestion(name, known)
                asked = f" and not {name!r}" if name else ""
                raise EnvironmentDefinitionError(
                    "\n".join(filter(None, (f"the MCP server {self._server.label} {has}{asked}", near)))
                )
        names = plain_names([name for name in known if name in self.only or not self.only], self.prefix)
        return [self._tool(known[name], plain) for name, plain in names.items()]

    async def close(self) -> None:
        """Close the session of the episode."""
        if self._session is not None and self._host is not None and not self.share:
            await self._host.loop.run(self._session.close)

    def _tool(self, given: Any, name: str) -> Tool:
        assert self._host is not None and self._session is not None, "setup has run"
        call = functools.partial(_call, self._host, self._session, given.name)

        async def function(**arguments: Any) -> str:
            return await call(arguments)

        words = given.description or given.title or ""
        return Tool(name, function, words, plain_schema(given.input_schema), self.call_seconds)

    def _read_server(self) -> Server:
        """The server of the settings. Raises ConfigError."""
        from rollouts_mcp.sessions import Server

        example = "type: --tool.ALIAS.server 'npx -y @modelcontextprotocol/server-everything', or a URL"
        is_url = isinstance(self.server, str) and self.server.startswith(("http://", "https://"))
        try:
            words = shlex.split(self.server) if isinstance(self.server, str) else list(self.server)
        except ValueError as error:
            raise ConfigError(f"server {self.server!r}: {error}\n{example}") from error
        if not words:
            raise ConfigError(f"the tool mcp needs a server: a command or a URL\n{example}")
        unused = ("env", "cwd") if is_url else ("headers",)
        for name in unused:
            if getattr(self, name):
                kind = "a URL" if is_url else "a command"
                raise ConfigError(f"server {self.server!r} is {kind}, which takes no setting `{name}`\nleave it out")
        if is_url:
            headers = tuple(self.headers.items())
            return Server(
                str(self.server),
                url=str(self.server),
                transport=self.transport,
                headers=headers,
                seconds=self.open_seconds,
            )
        if shutil.which(words[0]) is None:
            raise ConfigError(f"server {self.server!r}: there is no command {words[0]!r}\n{example}")
        env = tuple(self.env.items())
        return Server(shlex.join(words), tuple(words), env=env, cwd=self.cwd, seconds=self.open_seconds)


async def _call(host: Host, session: Session, name: str, arguments: dict[str, Any]) -> str:
    """The text of a result. Raises ValueError if the server says that the call failed."""
    result = await host.loop.run(session.call, name, arguments)
    if result.is_error:
        raise ValueError(text_of(result) or "the tool failed")
    return text_of(result)
