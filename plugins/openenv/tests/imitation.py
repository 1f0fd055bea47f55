"""An imitation of OpenEnv's and ORS' servers, with the environments of `openenv_server.py` and `ors_server.py`.

`test_real.py` compares its messages with those of the real servers. Some numbers do what servers should not do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
import uuid

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

ACTION = {
    "additionalProperties": False,
    "description": "A guess of a number.",
    "properties": {
        "metadata": {
            "additionalProperties": True,
            "description": "Additional metadata for the action",
            "title": "Metadata",
            "type": "object",
        },
        "number": {"title": "Number", "type": "integer"},
        "tone": {"default": "calm", "enum": ["calm", "loud"], "title": "Tone", "type": "string"},
    },
    "required": ["number"],
    "title": "Guess",
    "type": "object",
}
SAY = {
    "properties": {"metadata": {"type": "object"}, "message": {"type": "string"}},
    "required": ["message"],
    "title": "Say",
    "type": "object",
}
CALL = {"properties": {"tool_name": {"type": "string"}}, "title": "CallToolAction", "type": "object"}
PRICE = {
    "name": "price",
    "description": "The price of an item.",
    "inputSchema": {"properties": {"item": {"type": "string"}}, "required": ["item"], "type": "object"},
}


class Refused(Exception):
    """An error message: its code, and more."""

    def __init__(self, message, code, **more):
        self.data = {"message": message, "code": code, **more}


class Guessing:
    """Guess a number."""

    action = ACTION

    def reset(self, seed=None, high=99, **_):
        self.number, self.tries = random.Random(seed).randrange(high + 1), 0
        return observation(f"Guess a number from 0 to {high}; it ends with {self.number % 10}.", 0)

    def step(self, given):
        if not isinstance(given.get("number"), int):
            wrong = {"loc": ["number"], "msg": "Input should be a valid integer"}
            raise Refused("Invalid message", "VALIDATION_ERROR", errors=[wrong])
        number, self.tries = given["number"], self.tries + 1
        if number == -3:
            raise Refused("there is no negative number here", "EXECUTION_ERROR")
        text = "right" if number == self.number else "higher" if number < self.number else "lower"
        reward = 1.0 if number == self.number else -0.25 * self.tries
        return observation(text, self.tries, reward, number == self.number or self.tries == 3)


class Echo:
    """Repeats, and never judges."""

    action = SAY

    def reset(self, **_):
        self.tries = 0
        return observation("Say something.", 0)

    def step(self, given):
        self.tries += 1
        return observation(given["message"], self.tries, None, self.tries == 2)


class Shop:
    """A tool of MCP by steps."""

    action = CALL

    def reset(self, split="train", index=0, **_):
        return {"observation": {"metadata": {"request": f"Please buy {split}-{index}."}}, "reward": None, "done": False}

    def step(self, given):
        item = given["arguments"]["item"]
        block = {"type": "text", "text": str(len(item))}
        error = {"error_type": "execution_error", "message": "it is sold out"} if item == "moon" else None
        found = {"tool_name": given["tool_name"], "result": {"content": [block], "is_error": False}, "error": error}
        return {"observation": found, "reward": float(item == "apple"), "done": item == "apple"}


class Mixed(Guessing):
    """An action of its own, and a tool of MCP beside it."""


KINDS = {"guessing": Guessing, "alone": Guessing, "echo": Echo, "shop": Shop, "mixed": Mixed}
TOOLS = {"shop": [PRICE], "mixed": [PRICE]}


def observation(text, tries, reward=None, done=False):
    return {"observation": {"metadata": {}, "text": text, "tries": tries}, "reward": reward, "done": done}


class Sessions:
    """The open sessions of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind, self.open, self.most = kind, 0, 1 if kind == "alone" else 8

    async def serve(self, socket: WebSocket) -> None:
        await socket.accept()
        if self.open == self.most:
            message = f"Server at capacity: {self.open}/{self.most} sessions active"
            more = {"active_sessions": self.open, "max_sessions": self.most}
            await socket.send_json({"type": "error", "data": {"message": message, "code": "CAPACITY_REACHED", **more}})
            return await socket.close()
        self.open += 1
        env = KINDS[self.kind]()
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            while (message := json.loads(await socket.receive_text()))["type"] != "close":
                number = (message.get("data") or {}).get("number")
                if number == -1:
                    break  # it dies
                if number == -2:
                    await asyncio.sleep(60)
                if number == -4:
                    await socket.send_text("junk")
                    continue
                await socket.send_json(self.answer(env, message))
            await socket.close()
        self.open -= 1

    def answer(self, env, message):
        kind, data = message["type"], message.get("data") or {}
        try:
            if kind == "mcp":
                text = str(len(data["params"]["arguments"]["item"]))
                result = {"content": [{"type": "text", "text": text}], "is_error": False}
                return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": data["id"], "result": result}}
            found = env.reset(**data) if kind == "reset" else env.step(data)
            if data.get("number") == -5:
                found["reward"] = "a lot"
            return {"type": "observation", "data": found}
        except Refused as error:
            return {"type": "error", "data": error.data}


def openenv(kind: str) -> Starlette:
    sessions = Sessions(kind)

    async def schema(_: Request):
        return JSONResponse({"action": KINDS[kind].action, "observation": {}, "state": {}})

    async def metadata(_: Request):
        name = kind.capitalize()
        return JSONResponse({"name": name, "description": f"{name} environment"})

    async def environments(_: Request):
        return JSONResponse([kind])

    async def splits(_: Request):
        if kind != "shop":
            return JSONResponse({"detail": "list_splits is not supported for this environment"}, 501)
        return JSONResponse([{"name": "train", "type": "train"}, {"name": "test", "type": "test"}])

    async def count(request: Request):
        return JSONResponse({"num_tasks": {"train": 5, "test": 3}[(await request.json())["split"]]})

    async def mcp(_: Request):
        if kind not in TOOLS:
            error = {"code": -32603, "message": "Environment does not support MCP", "data": None}
            return JSONResponse({"jsonrpc": "2.0", "id": 1, "error": error})
        return JSONResponse({"jsonrpc": "2.0", "id": 1, "result": {"tools": TOOLS[kind]}})

    return Starlette(
        routes=[
            Route("/schema", schema),
            Route("/metadata", metadata),
            Route("/list_environments", environments),
            Route(f"/{kind}/splits", splits),
            Route(f"/{kind}/num_tasks", count, methods=["POST"]),
            Route("/mcp", mcp, methods=["POST"]),
            WebSocketRoute("/ws", sessions.serve),
        ]
    )


def ors() -> Starlette:
    """A server of the Open Reward Standard."""
    tasks = {"train": [{"number": number} for number in (7, 8, 9)], "test": [{"number": 3}]}
    known: dict[str, dict] = {}
    calls: dict[str, str] = {}
    schema = {"properties": {"number": {"type": "integer"}}, "required": ["number"], "type": "object"}
    tools = [
        {"name": "guess", "description": "Guess the number.", "input_schema": schema},
        {"name": "look", "description": "Look at the task. It gives no reward.", "input_schema": None},
    ]

    def stream(*events: tuple[str, str]):
        async def lines():
            for event, data in events:
                yield f": ping\r\n\r\nevent: {event}\r\ndata: {data}\r\n\r\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    def session(request: Request):
        return known.get(request.headers.get("X-Session-ID", ""))

    async def create_session(_: Request):
        return stream(("task_id", uuid.uuid4().hex), ("end", ""))

    async def create(request: Request):
        sid = request.headers["X-Session-ID"]
        known[sid] = {"spec": (await request.json())["task_spec"], "tries": 0}
        return JSONResponse({"sid": sid})

    async def prompt(request: Request):
        number = session(request)["spec"]["number"]
        return JSONResponse([{"text": f"Guess the number before {number + 1}.", "detail": None, "type": "text"}])

    async def call(request: Request):
        body, env = await request.json(), session(request)
        if env is None:
            return JSONResponse({"detail": "Active environment not found"}, 404)
        task_id = body.get("task_id") or uuid.uuid4().hex
        if task_id in calls:
            return stream(("task_id", task_id), ("end", calls[task_id]))
        number = body["input"].get("number")
        if number == -3:
            return stream(("task_id", task_id), ("error", "there is no negative number here"))
        if number == -2:
            await asyncio.sleep(60)
        if number == -4:
            return stream(("task_id", task_id), ("end", "junk"))
        env["tries"] += body["name"] == "guess"
        is_right = number == env["spec"]["number"]
        text = "a number" if body["name"] == "look" else "right" if is_right else "wrong " + "x" * 9000
        gain = None if body["name"] == "look" else 1.0 if is_right else -0.25 * env["tries"]
        block = {"text": text, "detail": None, "type": "text"}
        done = is_right or env["tries"] == 3
        output = {"blocks": [block], "metadata": None, "reward": gain, "finished": done}
        found = json.dumps({"ok": True, "output": output})
        if number == -6:  # the stream breaks off, and the call goes on
            calls[task_id] = found
            return stream(("task_id", task_id))
        parts = [found[place : place + 4096] for place in range(0, len(found), 4096)]
        return stream(("task_id", task_id), *(("chunk", part) for part in parts[:-1]), ("end", parts[-1]))

    async def simple(request: Request):
        answers = {
            "/list_environments": ["guessing"],
            "/guessing/splits": [{"name": "train", "type": "train"}, {"name": "test", "type": "test"}],
            "/guessing/task_tools": {"tools": tools},
        }
        return JSONResponse(answers[request.scope["path"].removeprefix("/ors")])

    async def count(request: Request):
        return JSONResponse({"num_tasks": len(tasks[(await request.json())["split"]])})

    async def task(request: Request):
        asked = await request.json()
        return JSONResponse({"task": tasks[asked["split"]][asked["index"]]})

    async def delete(request: Request):
        known.pop(request.headers.get("X-Session-ID", ""), None)
        return JSONResponse({"sid": ""})

    app = Starlette(
        routes=[
            *(Route(path, simple) for path in ("/list_environments", "/guessing/splits", "/guessing/task_tools")),
            Route("/guessing/num_tasks", count, methods=["POST"]),
            Route("/guessing/task", task, methods=["POST"]),
            Route("/create_session", create_session, methods=["POST"]),
            Route("/create", create, methods=["POST"]),
            Route("/guessing/prompt", prompt),
            Route("/guessing/call", call, methods=["POST"]),
            *(Route(path, delete, methods=["POST"]) for path in ("/delete", "/delete_session", "/ping")),
        ]
    )
    app.state.sessions = known
    return app


@contextlib.contextmanager
def serving(ping_seconds: float = 20.0):
    """The address of all imitations, on a free port, and the open sessions of ORS."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    standard = ors()
    other = Route("/other", lambda _: PlainTextResponse("hello"))
    routes = [*(Mount(f"/{kind}", openenv(kind)) for kind in KINDS), Mount("/ors", standard), other]
    ping = {"ws_ping_interval": ping_seconds, "ws_ping_timeout": ping_seconds}
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=port, log_level="critical", **ping))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}", standard.state.sessions
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
