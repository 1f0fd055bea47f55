"""The actor on a node of the cluster. It starts a worker's process there, and is the way to its streams.

When the actor ends in any way, the process and all processes that it started end too. Not here: where the actor is
placed (`driver`), and what the process answers (`rollouts.env.workers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from rollouts.child_environment import child_environment
from rollouts.env.workers.channel import MESSAGE_BYTES_MAX
from rollouts.env.workers.process import Options, worker_command
from rollouts.env.workers.protocol import (
    Answer,
    Failure,
    Hello,
    ProtocolError,
    Request,
    encode_value,
    error_received,
    read_from_worker,
)
from rollouts.errors import words_of_exit
from rollouts.supervisor import supervised

CHUNK = 1 << 20
LAST_CHARACTERS = 2_000


class WorkerActor:
    """A worker's process. All methods but `node` and `start` need `start` first."""

    def __init__(self) -> None:
        self._process: Process
        self._unread = b""  # of the process's output
        self._lifeline = os.pipe()  # when this pipe closes, the process ends

    async def node(self) -> str:
        """The address of this node."""
        import ray.util

        return str(ray.util.get_node_ip_address())

    async def start(self, environment: str, options: Options, folder: str, variables: dict[str, str]) -> str:
        """Start the process, and make it load the environment. Returns why it cannot; empty if it can.

        `folder` is the working directory, if it exists on this node. `variables` are added to those that a worker gets
        of this node's environment.
        """
        cwd = folder if os.path.isdir(folder) else None  # noqa: ASYNC240 - it is quick
        self._process = await asyncio.create_subprocess_exec(
            *supervised(worker_command(options), self._lifeline[0]),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            pass_fds=self._lifeline[:1],
            env=child_environment() | variables,
            cwd=cwd,
            start_new_session=True,
            limit=MESSAGE_BYTES_MAX,
        )
        try:
            problem = await self._load(environment)
        except (ProtocolError, EOFError) as error:
            code = await self.end(0.0)
            printed = (await self.read(2))[-LAST_CHARACTERS:].decode(errors="replace").strip()
            problem = f"{error} ({words_of_exit(code)}); its last words:\n{printed}"
        if problem:
            await self.end(0.0)
        return problem

    async def _load(self, environment: str) -> str:
        hello = await self._line()
        if not isinstance(read_from_worker(hello), Hello):
            return f"the worker begins with {hello[:80]!r}"
        asked = Request(0, "describe", 0, encode_value({"name": environment}, environment))
        await self.write(msgspec.json.encode(asked) + b"\n")
        while not isinstance(answer := read_from_worker(await self._line()), Answer | Failure):
            pass  # a report of an error that fails nothing
        self._unread = hello
        if isinstance(answer, Answer):
            return ""
        error = error_received(answer.error, "the worker")
        return f"{error}\nits Python: {sys.executable}"

    async def _line(self) -> bytes:
        assert self._process.stdout is not None, "it was started with pipes"
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the worker ended before it had loaded the environment")
        return line

    async def write(self, data: bytes) -> None:
        """Write to the process. If it has ended, `read` says so."""
        assert self._process.stdin is not None, "it was started with pipes"
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def read(self, stream: int) -> bytes:
        """The next bytes of its output (1) or of what its code prints (2); empty when it has ended."""
        if stream == 1 and self._unread:
            unread, self._unread = self._unread, b""
            return unread
        source = self._process.stdout if stream == 1 else self._process.stderr
        assert source is not None, "it was started with pipes"
        return await source.read(CHUNK)

    async def end(self, grace_seconds: float) -> int:
        """Close the input of the process. After this time, kill it with all processes that it started. Returns its
        exit code.
        """
        assert self._process.stdin is not None, "it was started with pipes"
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_seconds)
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        return await self._process.wait()
