"""Servers that an environment plays on: their address, what they offer, asked with JSON over HTTP, and their tools.

Not here: the requests of an episode, which each protocol makes in its own way.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from rollouts.env.json_schemas import plain_names, plain_schema
from rollouts.env.task_tools import Tool
from rollouts.errors import ConfigError, EnvironmentDefinitionError

SECONDS = 30.0  # the deadline of a request
TOOL_SECONDS = 5.0  # how much later than that of a session's request the deadline of a tool is
SCHEMAS = ("parameters", "input_schema", "inputSchema")  # what protocols call the schema of a tool's arguments


def check_url(url: str, example: str) -> None:
    """Raise ConfigError if this is no HTTP address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        given = f"{url!r} is no address of a server" if url else "no server is given"
        raise ConfigError(f"--env.url: {given}\ntype: --env.url {example}")


class Service:
    """A server that is asked for facts. Raises EnvironmentDefinitionError if it cannot be reached, or if it answers
    with something else than JSON. `kind` names what it should be.
    """

    def __init__(self, url: str, kind: str, headers: Mapping[str, str]) -> None:
        self.url, self.kind, self._headers = url.rstrip("/"), kind, dict(headers)

    def get(self, path: str) -> Any:
        """The JSON of a GET; None if the server does not have this path."""
        return self._ask("GET", path)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of a POST; None if the server does not have this path."""
        return self._ask("POST", path, json=body)

    def require(self, path: str) -> Any:
        """Like `get`, but a path that is absent is an error."""
        found = self.get(path)
        if found is None:
            raise self._error(f"it answers, but has no {path}, as every {self.kind} has")
        return found

    def _ask(self, method: str, path: str, **body: Any) -> Any:
        import httpx

        try:
            answer = httpx.request(
                method, self.url + path, headers=self._headers, timeout=SECONDS, follow_redirects=True, **body
            )
        except httpx.HTTPError as error:
            raise self._error(f"{type(error).__name__}: {error}") from error
        if answer.status_code in (404, 405, 501):
            return None
        try:
            if answer.is_success:
                return answer.json()
        except ValueError:
            raise self._error(f"{method} {path} gave no JSON: {answer.text[:200]!r}") from None
        raise self._error(f"{method} {path} gave the status {answer.status_code}: {answer.text[:200]}")

    def _error(self, why: str) -> EnvironmentDefinitionError:
        return EnvironmentDefinitionError(
            f"--env.url {self.url}: no {self.kind} can be asked there: {why}\nstart the server, or correct the address"
        )


Ask = Callable[[str, dict[str, Any]], Awaitable[str]]
"""`ask(name, arguments)`: the text that a server answers to a call of its tool."""


def tools_of_server(listed: Iterable[Mapping[str, Any]], ask: Ask, call_seconds: float, own: str = "") -> list[Tool]:
    """The tools that a server lists, which are called with `ask` by the server's names. No tool gets the name `own`."""
    known = [(str(each["name"]), each) for each in listed]
    names = plain_names([*filter(None, [own]), *(name for name, _ in known)])
    return [_tool_of_server(names[name], each, functools.partial(ask, name), call_seconds) for name, each in known]


def _tool_of_server(name: str, given: Mapping[str, Any], ask: Callable[..., Awaitable[str]], seconds: float) -> Tool:
    async def called(**arguments: Any) -> str:
        return await ask(arguments)

    schema: Mapping[str, Any] = next((found for key in SCHEMAS if (found := given.get(key))), {})
    return Tool(name, called, str(given.get("description") or ""), plain_schema(schema), seconds + TOOL_SECONDS)
