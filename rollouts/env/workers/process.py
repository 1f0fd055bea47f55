"""A worker in a child process: `main` runs in the child, and `ProcessConnector` starts it.

Messages go through the child's standard input and output. What the environment's code prints goes to standard error,
which the run writes to a log file. The child runs under a supervisor (`rollouts.supervisor`), so that it and all
processes that it starts end with the run, also if the run is killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import trio

from rollouts.env.processes import open_supervised
from rollouts.env.worker import take_streams as take_streams
from rollouts.env.workers.channel import CHUNK, MessageChannel, PipeChannel
from rollouts.env.workers.protocol import SandboxSent
from rollouts.errors import WorkerError, words_of_exit

BOOT = "import sys; sys.path[:] = sys.argv[2:]; from rollouts.env.workers.process import main; main(sys.argv[1])"
VENV_BOOT = "import sys; from rollouts.env.workers.process import main; main(sys.argv[1])"
END_SECONDS = 10.0  # how long to wait for the end of a killed process


class Options(msgspec.Struct, omit_defaults=True):
    """What a worker process may do. `memory_gib` and `cpu_seconds` are limits of the operating system. `only` is the
    one environment that it loads; empty: any. With `only`, `sandbox` is the one sandbox that it opens; None: none.
    """

    memory_gib: float | None = None
    cpu_seconds: float | None = None
    only: str = ""
    sandbox: SandboxSent | None = None


def main(given: str) -> None:
    """Answer the requests on standard input until it is closed. `given` are Options as JSON."""
    from rollouts.env.shared import shared_values
    from rollouts.env.workers.library import Library, OpenSandboxes
    from rollouts.env.workers.server import serve_worker

    options = msgspec.json.decode(given, type=Options)
    requests, answers = take_streams()
    set_limits(options)

    async def run() -> None:
        streams = trio.lowlevel.FdStream(answers), trio.lowlevel.FdStream(requests)
        await serve_worker(PipeChannel(*streams), Library(options.only), OpenSandboxes(options.only, options.sandbox))

    with shared_values():
        trio.run(run)
    os._exit(0)  # threads of the environment's code may still run


def worker_command(options: Options, python: Path | None = None) -> list[str]:
    """The command of a worker that reads requests from its standard input; see `ProcessConnector`."""
    given = msgspec.json.encode(options).decode()
    if python is not None:
        return [str(python), "-I", "-c", VENV_BOOT, given]
    return [sys.executable, "-c", BOOT, given, *sys.path]


def set_limits(options: Options) -> None:
    """Set the limits of this process, which each of its children has too. An allocation beyond the memory raises
    MemoryError; the signal SIGXCPU, and SIGKILL soon after it, ends a process that used all its CPU time.
    """
    import resource

    if options.memory_gib is not None:
        most = int(options.memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if options.cpu_seconds is not None:
        seconds = math.ceil(options.cpu_seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class ProcessConnector:
    """Starts workers as child processes of this one. `python` is the interpreter of a virtual environment that has the
    environment; without it, workers import what this process does. `command` is another command that speaks the
    protocol, and ends with the exit code of its worker.
    """

    def __init__(
        self,
        environment: dict[str, str],
        options: Options = Options(),  # noqa: B008 - it is not changed
        *,
        python: Path | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self._command = list(command) or worker_command(options, python)
        self._options = options
        self._environment = environment
        self._lifeline = os.pipe()  # when this pipe closes, the processes end

    async def open(self, log: Callable[[bytes], None]) -> _Process:
        """Start a process. Raises WorkerError."""
        try:
            process = await open_supervised(self._command, self._lifeline[0], self._environment, subprocess.PIPE)
        except OSError as error:
            raise WorkerError(f"no process could be started for a worker: {error}") from error
        return _Process(process, log, self._options)


class _Process:
    def __init__(self, process: trio.Process, log: Callable[[bytes], None], options: Options) -> None:
        assert process.stdin is not None and process.stdout is not None, "it was started with pipes"
        self.channel: MessageChannel = PipeChannel(process.stdin, process.stdout)
        self._process, self._log, self._drained = process, log, trio.Event()
        self._options = options
        trio.lowlevel.spawn_system_task(self._drain)

    async def _drain(self) -> None:
        """Read what the environment's code prints, until the process has ended."""
        assert self._process.stderr is not None, "it was started with pipes"
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while chunk := await self._process.stderr.receive_some(CHUNK):
                self._log(bytes(chunk))
        self._drained.set()

    async def end(self, grace_seconds: float = 0.0) -> str:
        """Wait for the end of the process, then make the supervisor kill it and all its child processes."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + END_SECONDS + grace_seconds):
            await self.channel.aclose()
            with trio.move_on_after(grace_seconds):
                await self._process.wait()
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()
            await self._drained.wait()  # its last words
        if self._process.poll() is None:
            self._process.kill()
        if self._process.returncode == 128 + signal.SIGXCPU and self._options.cpu_seconds is not None:
            return (
                f"it used more than the {self._options.cpu_seconds:g} CPU seconds of worker.cpu_seconds; "
                "to raise them, type --worker.cpu-seconds N"
            )
        return words_of_exit(self._process.returncode)

    async def words_of_silence(self) -> str:
        """Why the worker may be silent."""
        return (
            "its process is stopped or has no CPU, or something blocks its event loop: an async function that does not "
            "await, such as one with time.sleep"
        )
