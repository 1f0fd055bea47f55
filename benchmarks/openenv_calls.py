"""Calls of an echo environment on OpenEnv's own server, to compare with `benchmarks/worker_cost.py`.

    python -m venv /tmp/openenv && /tmp/openenv/bin/pip install openenv==0.10.0 psutil
    /tmp/openenv/bin/python benchmarks/openenv_calls.py [--calls 2000] [--concurrency 16]

It needs nothing of rollouts. The server is a child process on loopback; each of the concurrent clients has a session of
its own, over the WebSocket of OpenEnv's client. It prints calls per second, and the CPU time of both for a call.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import time
from typing import Any

import psutil
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient

ROUNDS = 5


class Say(Action):
    """A text."""

    text: str


class Said(Observation):
    """The same text."""

    text: str = ""


class Echo(Environment):
    """Returns what it gets."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, *args: Any, **kwargs: Any) -> Said:
        """A new episode."""
        return Said()

    def step(self, action: Say, *args: Any, **kwargs: Any) -> Said:  # type: ignore[override]
        """Say the text."""
        return Said(text=action.text)

    @property
    def state(self) -> State:
        """Nothing."""
        return State()


def serve(port: int) -> None:
    """OpenEnv's server."""
    uvicorn.run(create_fastapi_app(Echo, Say, Said, max_concurrent_envs=256), port=port, log_level="warning")


def cpu_seconds() -> float:
    """CPU time of this process and of the server."""
    return sum(sum(each.cpu_times()[:2]) for each in (psutil.Process(), *psutil.Process().children(recursive=True)))


async def main(port: int, calls: int, concurrency: int) -> None:
    """Measure, and print the medians."""
    clients = [GenericEnvClient(base_url=f"http://127.0.0.1:{port}") for _ in range(concurrency)]
    for client in clients:
        await client.connect()
        await client.reset()
    found = []
    for number in range(ROUNDS + 1):
        begun, cpu = time.perf_counter(), cpu_seconds()

        async def several(client: GenericEnvClient) -> None:
            for _ in range(calls // concurrency):
                await client.step({"text": "hello"})

        await asyncio.gather(*map(several, clients))
        done = calls // concurrency * concurrency
        if number:  # the first round warms up
            found.append((done / (time.perf_counter() - begun), (cpu_seconds() - cpu) / done))
    rate, used = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"openenv, {concurrency} at the same time: {rate:8.0f} calls/s   {used * 1e6:6.0f} µs of CPU each")
    for client in clients:
        await client.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=16)
    given = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    server.start()
    while socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.1)
    asyncio.run(main(port, given.calls, given.concurrency))
    server.terminate()
