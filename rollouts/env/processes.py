"""Isolated tools (`@tool(isolate="process")`): a small pool of processes, which can always be killed.

A thread that runs past its deadline cannot be stopped. A process can, even in an endless loop, in C code that keeps the
GIL, or while it waits for a child. Processes start when they are needed (at most `WORKERS_MAX`, never by fork) and are
used again. They end when the trio run ends, or when this process is killed. Module variables that one call sets are
visible to the next call, also from another episode, so an isolated tool should depend on its arguments alone.

Not here: what the process does (`worker`), the supervisor of the process and its children (`rollouts.supervisor`), and
which functions can run there (`authoring`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import trio

from rollouts.child_environment import child_environment
from rollouts.env.authoring import ToolReference, reference_of
from rollouts.env.calls import CallTimeoutError
from rollouts.env.results import ToolOutcome
from rollouts.env.threads import of_this_run
from rollouts.env.workers.channel import ChannelClosedError, PipeChannel
from rollouts.error_log import Fault, report_fault
from rollouts.errors import EnvironmentDefinitionError, ProcessError, words_of_exit
from rollouts.supervisor import supervised

WORKERS_MAX = max(4, os.cpu_count() or 1)  # processes of one trio run
START_SECONDS = 60.0  # how long a process may take to start and to import the tool's module
END_SECONDS = 5.0  # how long to wait for the end of a killed process
BOOT = "import sys; sys.path[:] = sys.argv[1:]; from rollouts.env.worker import main; main()"


async def call_isolated(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    label: str,
    timeout_seconds: float,
    characters_max: int = 16_000,
) -> ToolOutcome:
    """Run the tool `label` with JSON arguments in another process. The deadline starts when the process is ready. Text
    of more than `characters_max` characters is cut.

    A cancellation kills the process too.

    Raises:
        CallTimeoutError: the deadline passed, and the process was killed.
        ProcessError: no process could be started.
        EnvironmentDefinitionError: the process cannot import the tool's module.
    """
    reference = reference_of(function)
    request = dict(call=reference, label=label, arguments=dict(arguments), characters_max=characters_max)
    try:
        _encoded(request)
    except (TypeError, ValueError, RecursionError) as error:
        return ToolOutcome(f"Error: the arguments of {label} cannot be written as JSON: {error}", "bad_arguments")
    return await of_this_run(_pool, _Pool).call(reference, request, label, timeout_seconds)


class _Worker:
    """One process and its pipes. `loaded` are the functions that the process has imported. If a call does not end, the
    worker stays `busy` and cannot be used again.
    """

    def __init__(self, process: trio.Process) -> None:
        assert process.stdin is not None and process.stdout is not None, "it was started with pipes"
        self.process, self._channel = process, PipeChannel(process.stdin, process.stdout)
        self.loaded: set[ToolReference] = set()
        self.busy = self.has_ended = False
        self._asked = 0

    async def ask(self, request: Mapping[str, Any]) -> ToolOutcome | None:
        """The outcome of one request. None if the process died, or if its answer cannot be read."""
        assert not self.busy, "one request at a time"
        self.busy = True
        self._asked += 1
        try:
            await self._channel.send(_encoded({"number": self._asked, **request}))
            answer: Any = {}
            while answer.get("number") != self._asked:  # any other line is a second answer to an earlier request
                answer = msgspec.json.decode(await self._channel.receive(), type=dict[str, Any])
            outcome = msgspec.convert(answer.get("outcome"), ToolOutcome)
            if "fault" in answer and "label" in request:
                report_fault(msgspec.convert(answer["fault"], Fault), f"the tool {request['label']}")
        except (ChannelClosedError, ValueError):  # also msgspec's errors
            return None
        self.busy = False
        return outcome

    async def end(self) -> int | None:
        """Make the supervisor kill the process and all its child processes, and wait until they have ended. Returns the
        exit code of the supervisor: the worker's own, or 128 + n if signal n killed the worker.
        """
        self.has_ended = True
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + END_SECONDS):
            await self._channel.aclose()
            await self.process.wait()
        if self.process.poll() is None:
            self.process.kill()
        return self.process.returncode


class _Pool:
    """The processes of one trio run."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._places = trio.CapacityLimiter(WORKERS_MAX)
        self._lifeline = os.pipe()  # when this pipe closes, the processes end
        trio.lowlevel.spawn_system_task(self.keep)

    async def keep(self) -> None:
        """Wait as a system task until the trio run ends, then end the processes."""
        try:
            await trio.sleep_forever()
        finally:
            while self._idle:
                await self._idle.pop().end()
            for end in self._lifeline:
                os.close(end)

    async def call(
        self, reference: ToolReference, request: Mapping[str, Any], label: str, seconds: float
    ) -> ToolOutcome:
        async with self._places:
            worker = await self._take()
            try:
                await self._load(worker, reference, label)
                with trio.move_on_after(seconds):
                    if (outcome := await worker.ask(request)) is not None:
                        return outcome
                    how = words_of_exit(await worker.end())
                    return ToolOutcome(f"Error: {label} crashed its process ({how})", "crashed")
                raise CallTimeoutError
            finally:
                if not worker.busy:
                    self._idle.append(worker)
                elif not worker.has_ended:
                    await worker.end()

    async def _take(self) -> _Worker:
        """The idle process that was used last. If there is none, a new one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            await worker.end()  # something else killed the process, such as the kernel if memory is full
        command = [sys.executable, "-c", BOOT, *sys.path]
        try:
            process = await open_supervised(command, self._lifeline[0], child_environment())
        except OSError as error:
            raise ProcessError(f"no process could be started for a tool: {error}") from error
        return _Worker(process)

    async def _load(self, worker: _Worker, reference: ToolReference, label: str) -> None:
        if reference in worker.loaded:
            return
        outcome = None
        with trio.move_on_after(START_SECONDS):
            outcome = await worker.ask({"load": reference})
        if outcome is None:
            raise ProcessError(
                f"the process for the tool {label} died, or did not import {reference.module} in {START_SECONDS:g} s"
            )
        if outcome.failure is not None:
            why = outcome.text.removeprefix("Error: ")
            raise EnvironmentDefinitionError(
                f"the tool {label} cannot run in a process of its own: {reference.module} does not import there "
                f'({why}); make the module importable on its own, or remove isolate="process"'
            )
        worker.loaded.add(reference)


_pool: trio.lowlevel.RunVar[_Pool] = trio.lowlevel.RunVar("rollouts-tool-processes")


def _encoded(request: Mapping[str, Any]) -> bytes:
    return json.dumps(request).encode()


async def open_supervised(
    command: list[str], lifeline: int, environment: Mapping[str, str], stderr: int | None = None
) -> trio.Process:
    """Start a process under a supervisor, with pipes. It ends when the pipe `lifeline` closes. Raises OSError."""
    return await trio.lowlevel.open_process(
        supervised(command, lifeline),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        pass_fds=[lifeline],
        env=environment,
        start_new_session=True,
    )
