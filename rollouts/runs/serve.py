"""A run's model behind an address, from its plan to the signal that ends it."""

from __future__ import annotations

import contextlib
import errno
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import trio

from rollouts.errors import ConfigError
from rollouts.inference.base import InferenceBackend, members_of
from rollouts.runs.plan import Plan
from rollouts.runs.run_model import temporary_engine
from rollouts.runs.session import load_chat
from rollouts.serve.chat_api import ChatAPI, ServedModel, refusal
from rollouts.serve.http_server import HTTPLimits, serve_http

SETTINGS = tuple("mode template inference max_tokens temperature trust_remote_code pass_env".split())
"""The settings of a run that hold for its model behind an address. Clients bring their own system prompt and tools."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Address(NamedTuple):
    """Where to serve: `port` 0 is a free one. `name` is the model's for clients; empty: that of its folder."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    request_seconds: float = 600.0


def serve(plan: Plan, address: Address, limits: HTTPLimits, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM comes; a second one drops the requests in flight.

    `say` gets the address when it answers, and what else is worth a line. Raises ConfigError: the address cannot be
    used, or the engine takes no token ids. Raises UserError where the model cannot be loaded.
    """
    if plan.is_chat:
        raise ConfigError(
            f"--inference {plan.one('inference').name} takes messages, and has an address of its own already; type "
            "--inference hf, vllm or sglang"
        )
    trio.run(_serve, plan, address, limits, say)


async def _serve(plan: Plan, address: Address, limits: HTTPLimits, say: Callable[[str], None]) -> None:
    listeners = await _listen(address)  # before a model loads
    settings, stopping = plan.settings, trio.Event()
    name = address.name or served_name(settings.model)
    port = listeners[0].socket.getsockname()[1]
    shown = f"[{address.host}]" if ":" in address.host else address.host
    async with contextlib.AsyncExitStack() as stack:
        for listener in listeners:
            stack.push_async_callback(listener.aclose)
        engine = stack.enter_context(temporary_engine(plan, []))
        chat = load_chat(settings, [])
        async with engine, trio.open_nursery() as nursery:
            nursery.start_soon(_stop, stopping, nursery.cancel_scope)
            api = ChatAPI(
                ServedModel(name, engine, chat, settings.max_tokens, settings.temperature, address.request_seconds)
            )
            say(f"serving {name} at http://{shown}:{port}/v1")
            for line in _notes(engine, address):
                say(line)
            await serve_http(api.handle, refusal, listeners, limits, stopping)
            nursery.cancel_scope.cancel()


def served_name(model: str) -> str:
    """The name of a model for clients: the run's for a run's folder or checkpoint, else the name as it is.

    >>> served_name("runs/first/checkpoints/step_000010"), served_name("Qwen/Qwen3-0.6B")
    ('first', 'Qwen/Qwen3-0.6B')
    """
    path = Path(model)
    if path.parent.name == "checkpoints":
        return path.parents[1].absolute().name
    return path.absolute().name if path.expanduser().is_dir() else model


async def _stop(stopping: trio.Event, everything: trio.CancelScope) -> None:
    """The first signal ends it in order, the second one at once."""
    with trio.open_signal_receiver(*SIGNALS) as signals:
        async for _ in signals:
            if stopping.is_set():
                everything.cancel()
            stopping.set()


async def _listen(address: Address) -> Sequence[trio.SocketListener]:
    try:
        listeners = await trio.open_tcp_listeners(address.port, host=address.host)
    except (OSError, OverflowError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        hint = "it is taken; type another --port, or --port 0 for a free one" if taken else str(error)
        raise ConfigError(f"--host {address.host} --port {address.port} cannot be used: {hint}") from error
    return listeners if address.port else listeners[:1]  # a free port of one is not free of the other


def _notes(engine: InferenceBackend, address: Address) -> list[str]:
    notes = [
        f"the server's own address: {url}/v1"
        for member in (members_of(engine) if engine.capabilities.is_pool else ())
        if (url := cast(str, getattr(member, "url", "")))
    ]
    if address.host not in LOOPBACK:
        notes.append("note: there is no password; everyone who reaches this address can use the model")
    return notes
