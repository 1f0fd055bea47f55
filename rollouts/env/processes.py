"""Tools in processes of their own (`@tool(isolate="process")`): a small pool, and a kill that always works.

A thread that runs past its deadline cannot be stopped; a process can, whatever it does: an endless loop, C code that
keeps the GIL, a child that it waits for. Processes are started when they are needed (`WORKERS_MAX` at most, never by
fork), used again, and end with the trio run, and with this process if it is killed. What a call leaves behind in a
module is there for the next one, of whatever episode: isolated tools are functions of their arguments.

Left out: what the process does (`worker`), what owns it and all that its tools start (`supervisor`), and which
functions can go there (`isolated`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import trio

from rollouts.child_environment import child_environment
from rollouts.env.calls import CallTimeoutError
from rollouts.env.isolated import Reference, reference_of
from rollouts.errors import EnvironmentDefinitionError, RolloutsError

__all__ = ["WORKERS_MAX", "Answer", "PoolStatistics", "ProcessError", "call_isolated", "statistics"]

WORKERS_MAX = max(4, os.cpu_count() or 1)  # processes of one trio run
START_SECONDS = 60.0  # until a process answers and has imported the tool's module
END_SECONDS = 5.0  # until a killed process is gone
CHUNK = 1 << 16
BOOT = "import sys; sys.path[:] = sys.argv[2:]; from rollouts.env.worker import main; main(int(sys.argv[1]))"


class ProcessError(RolloutsError):
    """A process for a tool could not be started. Inside an episode: Status.ENVIRONMENT_ERROR."""


Kind = Literal["text", "raised", "refused", "crashed"]
WORDS: tuple[Kind, ...] = ("text", "raised", "refused")  # what a process answers to a call


class Answer(NamedTuple):
    """What came of a call, in words for the model: the result, what was raised, why the arguments were refused, or how
    the process died.
    """

    kind: Kind
    words: str


class PoolStatistics(NamedTuple):
    """Processes of this trio run: started ever, killed at a deadline (or a cancellation), crashed by themselves."""

    started: int = 0
    killed: int = 0
    crashed: int = 0


async def call_isolated(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    label: str,
    timeout_seconds: float,
    characters_max: int = 16_000,
) -> Answer:
    """Run the tool `label` with JSON arguments in a process of its own. The wait for a process, and its start, are not
    part of the deadline. Longer text is cut.

    Cancellation kills the process, like the deadline.

    Raises:
        CallTimeoutError: the deadline passed; the process is gone.
        ProcessError: no process could be started.
        EnvironmentDefinitionError: the tool's module cannot be imported there.
    """
    reference = reference_of(function)
    request = {
        "call": reference._asdict(),
        "label": label,
        "arguments": dict(arguments),
        "characters_max": characters_max,
    }
    try:
        _line(request)
    except (TypeError, ValueError, RecursionError) as error:
        return Answer("refused", f"the arguments of {label} cannot be written as JSON: {error}")
    return await _pool_of_this_run().call(reference, request, label, timeout_seconds)


def statistics() -> PoolStatistics:
    """What the current trio run's processes came to; call it within the run."""
    pool = _pool.get(None)
    return PoolStatistics() if pool is None else pool.statistics


class _Worker:
    """One process and its pipes. `loaded` are the functions it has imported; a call that did not end leaves it `busy`,
    and of no more use.
    """

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.loaded: set[Reference] = set()
        self.busy = False
        self.has_ended = False
        self._asked = 0
        self._unread = bytearray()

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """One request, which gets a number; None where the process died, or answered with what is no answer."""
        assert self.process.stdin is not None and self.process.stdout is not None, "it was started with pipes"
        assert not self.busy, "one request at a time"
        self.busy = True
        self._asked += 1
        try:
            await self.process.stdin.send_all(_line({"number": self._asked, **request}))
            while True:
                answer = json.loads(await self._line_read(self.process.stdout))
                if not isinstance(answer, dict):
                    return None
                if answer.get("number") == self._asked:  # else it answers an earlier request once more
                    self.busy = False
                    return answer
        except (trio.BrokenResourceError, ValueError):
            return None

    async def _line_read(self, stream: trio.abc.ReceiveStream) -> bytes:
        """One line of what the process says. Raises ValueError where it ends."""
        searched = 0
        while (end := self._unread.find(b"\n", searched)) < 0:
            searched = len(self._unread)
            chunk = await stream.receive_some(CHUNK)
            if not chunk:
                raise ValueError("the process has ended")
            self._unread += chunk
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line

    async def end(self) -> int | None:
        """Have its supervisor kill it with all that it started, and wait until they are gone; its exit status is that
        of its own death, if it was dead already.
        """
        self.has_ended = True
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + END_SECONDS):
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    await stream.aclose()
            await self.process.wait()
        if self.process.poll() is None:
            self.process.kill()
        return self.process.returncode


_open_here: set[_Pool] = set()


class _Pool:
    """The processes of one trio run."""

    def __init__(self) -> None:
        self.statistics = PoolStatistics()
        self._idle: list[_Worker] = []
        self._places = trio.CapacityLimiter(WORKERS_MAX)
        self._lifeline: tuple[int, ...] = os.pipe()
        _open_here.add(self)

    async def keep(self) -> None:
        """A system task: when the run is over, so are the processes."""
        try:
            await trio.sleep_forever()
        finally:
            while self._idle:
                await self._idle.pop().end()
            self.let_go()

    def let_go(self) -> None:
        """Close the pipe whose end ends the processes. One that was forked from this one must not keep it open."""
        _open_here.discard(self)
        ends, self._lifeline = self._lifeline, ()
        for end in ends:
            os.close(end)

    async def call(self, reference: Reference, request: Mapping[str, Any], label: str, seconds: float) -> Answer:
        async with self._places:
            worker = await self._take()
            try:
                await self._load(worker, reference, label)
                with trio.move_on_after(seconds):
                    answer = _read(await worker.ask(request))
                    return await self._crashed(worker, label) if answer is None else answer
                raise CallTimeoutError
            finally:
                if not worker.busy:
                    self._idle.append(worker)
                elif not worker.has_ended:
                    self._count(killed=1)
                    await worker.end()

    async def _take(self) -> _Worker:
        """A process that waits for work, the last used first; else a new one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            await worker.end()  # somebody else killed it, such as the kernel for want of memory
        command = [sys.executable, "-c", BOOT, str(self._lifeline[0]), *sys.path]
        try:
            process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=self._lifeline[:1],
                env=child_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise ProcessError(f"no process could be started for a tool: {error}") from error
        self._count(started=1)
        return _Worker(process)

    async def _load(self, worker: _Worker, reference: Reference, label: str) -> None:
        if reference in worker.loaded:
            return
        answer = None
        with trio.move_on_after(START_SECONDS):
            answer = await worker.ask({"load": reference._asdict()})
        if answer is None:
            raise ProcessError(
                f"the process for the tool {label} died, or did not import {reference.module} in {START_SECONDS:g} s"
            )
        if "raised" in answer:
            raise EnvironmentDefinitionError(
                f"the tool {label} cannot run in a process of its own: {reference.module} does not import there "
                f'({answer["raised"]}); its module must import by itself, or leave isolate="process" out'
            )
        worker.loaded.add(reference)

    async def _crashed(self, worker: _Worker, label: str) -> Answer:
        self._count(crashed=1)
        return Answer("crashed", f"{label} crashed its process ({_words_of_exit(await worker.end())})")

    def _count(self, **more: int) -> None:
        self.statistics = PoolStatistics(
            *(getattr(self.statistics, name) + more.get(name, 0) for name in PoolStatistics._fields)
        )


_pool: trio.lowlevel.RunVar[_Pool | None] = trio.lowlevel.RunVar("rollouts-tool-processes")


def _pool_of_this_run() -> _Pool:
    pool = _pool.get(None)
    if pool is None:
        pool = _Pool()
        _pool.set(pool)
        trio.lowlevel.spawn_system_task(pool.keep)
    return pool


def _let_go_in_child() -> None:
    for pool in list(_open_here):
        pool.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


def _line(request: Mapping[str, Any]) -> bytes:
    return json.dumps(request).encode() + b"\n"


def _read(answer: dict[str, Any] | None) -> Answer | None:
    """What the process answered; None where that is no answer."""
    for kind in WORDS:
        if answer is not None and isinstance(answer.get(kind), str):
            return Answer(kind, answer[kind])
    return None


def _words_of_exit(status: int | None) -> str:
    if status is None:
        return "how it ended is not known"
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
