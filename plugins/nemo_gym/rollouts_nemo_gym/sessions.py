"""A session with a resources server of NeMo Gym. The server knows it by a cookie, which each request sends again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import trio

from rollouts.errors import ServiceLostError

WORDS = 300  # how much of an error of the server is shown


class RefusedError(Exception):
    """The server does not take a request: its body is not what the server expects, or the server has a bug."""


class Session:
    """A session. Raises ServiceLostError if the server cannot be reached, or does not answer in time."""

    def __init__(self, url: str, headers: Mapping[str, str], seconds: float) -> None:
        self._url, self._seconds = url.rstrip("/"), seconds
        self._http = httpx.AsyncClient(base_url=self._url, headers=dict(headers), timeout=None)

    async def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The object that the server answers. Raises RefusedError."""
        answer = await self._post(path, body)
        if not answer.is_success:
            raise RefusedError(f"POST {path} gave the status {answer.status_code}: {_words(answer)}")
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RefusedError(f"POST {path} gave {answer.text[:WORDS]!r}, which is no JSON object")
        return found

    async def call(self, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """The status and the text that the server answers."""
        answer = await self._post(path, body)
        return answer.status_code, answer.text

    async def close(self) -> None:
        """Close the connection. The server keeps what it knows of the session."""
        await self._http.aclose()

    async def _post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        with trio.move_on_after(self._seconds):
            try:
                return await self._http.post(path, json=dict(body))
            except httpx.HTTPError as error:
                raise self._lost(f"{type(error).__name__}: {error}") from error
        raise self._lost(f"it answered nothing to POST {path} for {self._seconds:g} seconds")

    def _lost(self, why: str) -> ServiceLostError:
        return ServiceLostError(f"the resources server {self._url} was lost: {why}")


def _words(answer: httpx.Response) -> str:
    """What an error says; of FastAPI's, the fields that are wrong."""
    try:
        detail = answer.json()["detail"]
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in detail)[:WORDS]
    except (ValueError, TypeError, KeyError):
        return answer.text[:WORDS]
