"""Serves a run's model over HTTP until a signal ends it."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from rollouts.agent.single_turns import ServedModel, SingleTurns
from rollouts.errors import ConfigError
from rollouts.gateway.api import API, error_response, unreadable
from rollouts.gateway.exchange import APIError
from rollouts.gateway.http_server import (
    Handler,
    HTTPLimits,
    HTTPRequest,
    HTTPResponse,
    bound_socket,
    serve_http,
    stop_at_signals,
)
from rollouts.inference.base import members_of
from rollouts.runs.folder import run_name
from rollouts.runs.plan import Plan
from rollouts.runs.run_model import temporary_engine
from rollouts.runs.session import load_chat

SETTINGS = tuple("mode template tool_parser inference max_tokens temperature trust_remote_code pass_env".split())
"""The settings of a run that apply when its model is served. Clients send their own system prompt and tools."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve_model(
    plan: Plan, host: str, port: int, name: str, request_seconds: float, limits: HTTPLimits, say: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM comes; a second one drops the requests in flight. `port` 0 means a free port.
    `name` is the model's name for clients; empty: the name of its folder.

    `say` is called with the address when the server is ready, and with other messages. Raises ConfigError if the
    address cannot be used, or if the engine takes no token ids, and UserError if the model cannot be loaded.
    """
    if plan.is_chat:
        raise ConfigError(
            f"--inference {plan.one('inference').name} is a chat API with an address of its own; type "
            "--inference hf, vllm or sglang"
        )
    with bound_socket(host, port, f"--host {host} --port {port}") as bound, temporary_engine(plan, []) as engine:
        settings, name = plan.settings, name or served_name(plan.settings.model)
        chat = load_chat(settings, [], tool_parser=plan.tool_parser)
        model = ServedModel(name, engine, chat, settings.max_tokens, settings.temperature, request_seconds)
        shown = f"[{host}]" if ":" in host else host
        lines = [f"serving {name} at http://{shown}:{bound.getsockname()[1]}/v1"]
        if host not in LOOPBACK:
            lines.append("note: there is no password; everyone who reaches this address can use the model")
        trio.run(_serve, model, bound, limits, lines, say)


async def _serve(
    model: ServedModel, bound: socket.socket, limits: HTTPLimits, lines: Sequence[str], say: Callable[[str], None]
) -> None:
    stopping, engine = trio.Event(), model.engine
    async with engine, trio.open_nursery() as nursery:
        nursery.start_soon(stop_at_signals, stopping, nursery.cancel_scope)
        members = members_of(engine) if engine.capabilities.is_pool else ()
        own = [f"the engine's own address: {url}/v1" for each in members if (url := getattr(each, "url", ""))]
        for line in (*lines, *own):
            say(line)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
        await serve_http(handler(model), unreadable, [listener], limits, stopping)
        nursery.cancel_scope.cancel()


def handler(model: ServedModel) -> Handler:
    """Answers the requests of any client. An error of rollouts does not end other requests."""
    turns = SingleTurns(model)
    context = model.engine.context_tokens_max
    api = API(turns.answer, name=model.name, context_tokens=context, health=turns.health)

    async def handle(request: HTTPRequest) -> HTTPResponse:
        try:
            return await api.handle(request)
        except Exception:
            traceback.print_exc()
            return error_response(request, APIError(500, "the server made a mistake; its output has the traceback"))

    return handle


def served_name(model: str) -> str:
    """The name of a model for clients: the name of the run for a run's folder or checkpoint, also of one of its phases;
    else the given name.

    >>> served_name("runs/first/checkpoints/step_000010"), served_name("Qwen/Qwen3-0.6B")
    ('first', 'Qwen/Qwen3-0.6B')
    """
    path = Path(model)
    path = path.parents[1] if path.parent.name == "adapters" else path  # the adapter of a role, in its checkpoint
    if path.parent.name == "checkpoints":
        return run_name(path.parents[1])
    return run_name(path) if path.expanduser().is_dir() else model
