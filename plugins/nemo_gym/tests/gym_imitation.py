"""An imitation of a resources server, written from the source of nemo-gym 0.4.0 (base_resources_server.py).

It counts in a session, as upstream's `example_session_state_mgmt` does. Some counts do what servers should not do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
import uuid

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route

COOKIE = "Counter___counter"
ITEMS = {
    "message": {"id", "content", "role", "status", "type"},
    "function_call": {"id", "arguments", "call_id", "name", "type", "status"},
    "function_call_output": {"call_id", "output", "type"},
    "reasoning": {"id", "summary", "type"},
}


class Counter:
    """The counts of the sessions, and the bodies that /verify got."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.verified: list[dict] = []

    async def seed(self, request: Request):
        body = await request.json()
        if "initial_count" not in body:
            wrong = {"type": "missing", "loc": ["body", "initial_count"], "msg": "Field required"}
            return JSONResponse({"detail": [wrong]}, 422)
        session = uuid.uuid4().hex
        self.counts[session] = body["initial_count"]
        answer = JSONResponse(body.get("seeded", {}))
        answer.set_cookie(COOKIE, session, httponly=True, samesite="lax")
        return answer

    async def increment(self, request: Request):
        session, count = request.cookies[COOKIE], (await request.json())["count"]
        if count == -1:
            await asyncio.sleep(60)
        if count == -2:
            return PlainTextResponse("Internal Server Error", 500)
        self.counts[session] += count
        answer = JSONResponse({"success": True})
        answer.set_cookie(COOKIE, session, httponly=True, samesite="lax")
        return answer

    async def value(self, request: Request):
        return JSONResponse({"count": self.counts[request.cookies[COOKIE]]})

    async def verify(self, request: Request):
        body = await request.json()
        self.verified.append(body)
        for item in body["response"]["output"]:
            assert set(item) <= ITEMS[item["type"]], item
        if "answer" in body:
            return (
                PlainTextResponse(body["answer"]) if isinstance(body["answer"], str) else JSONResponse(body["answer"])
            )
        right = self.counts[request.cookies[COOKIE]] == body["expected_count"]
        return JSONResponse({**body, "reward": float(right), "reward_components": {"exact": float(right)}, "steps": 2})


def app(counter: Counter, *, paths: dict) -> Starlette:
    async def openapi(_: Request):
        return JSONResponse({"openapi": "3.1.0", "info": {"title": "FastAPI"}, "paths": paths})

    post = {"methods": ["POST"]}
    return Starlette(
        routes=[
            Route("/openapi.json", openapi),
            Route("/seed_session", counter.seed, **post),
            Route("/increment_counter", counter.increment, **post),
            Route("/get_counter_value", counter.value, **post),
            Route("/verify", counter.verify, **post),
        ]
    )


@contextlib.contextmanager
def serving():
    """The address of the server on a free port, and its counter."""
    counter = Counter()
    good = {"/seed_session": {}, "/verify": {}, "/increment_counter": {}}
    apps = {"counter": good, "agent": {"/run": {}}, "steps": {**good, "/step": {}}}
    routes = [Mount(f"/{name}", app(counter, paths=paths)) for name, paths in apps.items()]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", counter
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


def row(**more) -> dict:
    """A row of upstream's example_session_state_mgmt."""
    count = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    tools = [
        {"type": "function", "name": "increment_counter", "parameters": count, "strict": True, "description": "Add."},
        {"type": "function", "name": "get_counter_value", "parameters": None, "strict": True, "description": ""},
    ]
    given = {
        "input": [{"role": "developer", "content": "Count."}, {"role": "user", "content": "add 3"}],
        "tools": tools,
    }
    return {"responses_create_params": given, "expected_count": 6, "initial_count": 3, **more}


def lines(*rows: dict) -> str:
    return "".join(json.dumps(each) + "\n" for each in rows)
