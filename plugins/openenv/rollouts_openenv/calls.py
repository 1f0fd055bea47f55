"""A session with a server of the Open Reward Standard: HTTP requests, of which two answer with a stream of events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import trio

from rollouts.errors import ServiceLostError
from rollouts_openenv.service import RefusedError

SESSION_HEADER, KEY_HEADER = "X-Session-ID", "X-API-Key"
PING_SECONDS = 60.0  # the server ends a session that is silent for 15 minutes
TRIES = 3  # of a call whose stream breaks off; it continues the same call


class Session:
    """A session: an environment with its task. Raises ServiceLostError if the server is lost."""

    def __init__(self, url: str, headers: Mapping[str, str], seconds: float) -> None:
        self._url, self._seconds = url.rstrip("/"), seconds
        self._http = httpx.AsyncClient(base_url=self._url, headers=dict(headers), timeout=seconds)
        self._sid, self._env = "", ""

    async def create(self, env: str, task_spec: Any, secrets: Mapping[str, str]) -> None:
        """Begin the session, with a task of an environment."""
        self._env = env
        created = await self._in_time(self._events("/create_session", {}))
        ended = _object(created.get("end", ""))
        sid = ended.get("sid") if ended else created.get("task_id")  # the name of the session, else that of the stream
        if not sid:
            raise self._lost(f"it gave no session: {created}")
        self._sid = self._http.headers[SESSION_HEADER] = str(sid)
        await self._request("POST", "/create", {"env_name": env, "task_spec": task_spec, "secrets": dict(secrets)})

    async def prompt(self) -> Any:
        """The blocks of the prompt."""
        return await self._request("GET", f"/{self._env}/prompt")

    async def tools(self) -> list[Any]:
        """The tools of this task."""
        found = await self._request("GET", f"/{self._env}/task_tools", may_be_absent=True)
        found = found or await self._request("GET", f"/{self._env}/tools")
        if not isinstance(found, dict) or not isinstance(found.get("tools"), list):
            raise self._lost(f"it answered {json.dumps(found)[:200]}, which is no list of tools")
        tools: list[Any] = found["tools"]
        return tools

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The output of a tool: `blocks`, `reward`, `finished`. Raises RefusedError."""
        body = {"name": tool, "input": dict(arguments)}
        answer = await self._in_time(self._continued(f"/{self._env}/call", body))
        if "error" in answer:
            raise RefusedError(answer["error"] or "the tool failed")
        found = _object(answer["end"])
        if found.get("ok") is False:
            raise RefusedError(str(found.get("error")))
        output = found.get("output")
        if not isinstance(output, dict) or not isinstance(output.get("finished", False), bool):
            raise self._lost(f"it answered {answer['end'][:200]!r}, which is no output of a tool")
        return output

    async def keep_alive(self) -> None:
        """Send pings, until it is cancelled."""
        while True:
            await trio.sleep(PING_SECONDS)
            await self._request("POST", "/ping", {})

    async def close(self) -> None:
        """End the session."""
        try:
            if self._sid:
                await self._request("POST", "/delete", {}, may_be_absent=True)
                await self._request("POST", "/delete_session", {}, may_be_absent=True)
        finally:
            await self._http.aclose()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _request(self, method: str, path: str, body: Any = None, *, may_be_absent: bool = False) -> Any:
        try:
            answer = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._lost(f"{type(error).__name__}: {error}") from error
        if may_be_absent and answer.status_code in (404, 405):
            return None
        if not answer.is_success:
            raise self._lost(f"{method} {path} gave the status {answer.status_code}: {answer.text[:200]}")
        try:
            return answer.json()
        except ValueError:
            raise self._lost(f"{method} {path} gave no JSON: {answer.text[:200]!r}") from None

    async def _continued(self, path: str, body: dict[str, Any]) -> dict[str, str]:
        """The events of a call. If the stream breaks off, the server is asked again for the same call."""
        found: dict[str, str] = {}
        for _ in range(TRIES):
            found = await self._events(path, body)
            if "end" in found or "error" in found or "task_id" not in found:
                break
            body = {**body, "task_id": found["task_id"]}
        if "end" not in found and "error" not in found:
            raise self._lost("the answer of a tool broke off")
        return found

    async def _in_time(self, request: Any) -> dict[str, str]:
        with trio.move_on_after(self._seconds):
            found: dict[str, str] = await request
            return found
        raise self._lost(f"it answered nothing for {self._seconds:g} seconds")

    async def _events(self, path: str, body: Mapping[str, Any]) -> dict[str, str]:
        """The events of a stream by their names, with chunks joined in `end`. Those that came, if it breaks off."""
        found, chunks = dict[str, str](), list[str]()
        try:
            async with self._http.stream("POST", path, json=dict(body)) as answer:
                if not answer.is_success:
                    words = (await answer.aread()).decode(errors="replace")[:200]
                    raise self._lost(f"POST {path} gave the status {answer.status_code}: {words}")
                async for event, data in _parsed(answer):
                    if event in ("chunk", "end"):
                        chunks.append(data)
                    found[event] = "".join(chunks) if event == "end" else data.strip()
        except httpx.HTTPError as error:
            if not found:
                raise self._lost(f"{type(error).__name__}: {error}") from error
        return found

    def _lost(self, why: str) -> ServiceLostError:
        return ServiceLostError(f"the ORS server {self._url} was lost: {why}")


def _object(text: str) -> dict[str, Any]:
    """The JSON object in a text; empty if it has none."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


async def _parsed(answer: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """The events of a response: their names and data."""
    event, lines = "", list[str]()
    async for line in answer.aiter_lines():
        if not line:
            if event:
                yield event, "\n".join(lines)
            event, lines = "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            event = value
        elif name == "data":
            lines.append(value)
