"""Servers that an environment plays on: their address, and what they offer, asked with JSON over HTTP.

Not here: the requests of an episode, which each protocol makes in its own way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rollouts.errors import ConfigError, EnvironmentDefinitionError

SECONDS = 30.0  # the deadline of a request


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
