"""The process of a model server that we start: with a free port, chosen GPUs and a log. It ends with the run.

    process = ServerProcess(lambda port: serve_vllm(python, model, port, options), name="vllm-0", folder=folder)
    await process.start(smoke)          # returns when the server answers and `smoke(url)` has generated something
    ... process.url ...
    await process.end()

A supervisor process (`rollouts.supervisor`) ends the server and all its child processes, on request or when this
process ends, even by SIGKILL. The HTTP calls are in `vllm` and `sglang`, and restarts in `server`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import trio

from rollouts.child_environment import FOR_SERVERS, child_environment
from rollouts.errors import ConfigError, InferenceError, words_of_exit
from rollouts.supervisor import supervised
from rollouts_servers.http import HTTPClient, Retries

GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL, if the server has not ended
END_SECONDS = 5.0  # how long to wait until killed processes have ended
POLL_SECONDS = 0.25  # the time between checks whether a starting server is ready
SMOKE_SECONDS = 120.0  # the deadline of the first generation, during which some engines compile
PORTS_MAX = 4  # how many ports to try
TAIL_BYTES = 1 << 23  # how much of a log is read; a crashing engine may print all its requests
LINES_MAX = 6

Smoke = Callable[[str], Awaitable[None]]
"""Takes the URL and generates something. Raises InferenceError if a retry may help, and ConfigError if not."""


class ServerCommand(NamedTuple):
    """The command that starts a server. `env` is added to the variables of every child process (`child_environment`).
    The server answers `ready_path` with 200 when it has loaded.
    """

    argv: list[str]
    env: dict[str, str]
    ready_path: str = "/health"


class ServerProcess:
    """The process of one server. `command` returns the command for a free port. If another process takes that port
    first, `command` is called again with another port.

    `gpus` (such as "0,1") becomes CUDA_VISIBLE_DEVICES; empty: unchanged. Output is appended to
    `<folder>/servers/<name>.log`. You can start the server again after it has ended. If `start` is cancelled, no
    process remains.
    """

    def __init__(
        self,
        command: Callable[[int], ServerCommand],
        *,
        name: str,
        folder: str | Path,
        gpus: str = "",
        start_seconds: float = 600.0,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        assert start_seconds > 0 and grace_seconds > 0, (start_seconds, grace_seconds)
        self.name = name
        self.log = Path(folder) / "servers" / f"{name}.log"
        self.url = ""
        self._command, self._gpus = command, gpus
        self._start_seconds, self._grace_seconds = start_seconds, grace_seconds
        self._process: trio.Process | None = None
        self._lifeline = -1
        self._log_start = 0

    def __repr__(self) -> str:
        return f"the server {self.name}"

    @property
    def has_ended(self) -> bool:
        """Whether the server's process has not started yet, or has ended."""
        return self._process is None or self._process.poll() is not None

    async def wait(self) -> str:
        """Wait until the server has ended. Returns a description of how it ended."""
        assert self._process is not None, "start it first"
        return _words_of(await self._process.wait())

    async def start(self, smoke: Smoke) -> None:
        """Start the server, and wait until it answers and `smoke(url)` succeeds.

        Raises ConfigError if the server ends early or is not ready within `start_seconds`; the message has the last
        meaningful lines of its log, and the log's path. A UserError of `smoke` is raised unchanged. After an exception,
        no process runs.
        """
        await self.end()
        began = trio.current_time()
        for attempt in range(1, PORTS_MAX + 1):
            port = free_port()
            self.url = f"http://127.0.0.1:{port}"
            ready = False
            try:
                ready = await self._start_on(self._command(port), smoke, began + self._start_seconds)
            finally:
                if not ready:
                    await self.end()
            if ready:
                return
            if attempt == PORTS_MAX or not self._port_was_taken():
                raise self._ended(trio.current_time() - began)

    async def end(self) -> None:
        """End the server and all its child processes: SIGTERM first, then SIGKILL. This also completes under
        cancellation, and takes little more than `grace_seconds` at most. Does nothing if no process runs.
        """
        if self._process is None:
            return
        process = self._process
        self._close_lifeline()
        with trio.CancelScope(shield=True):
            with trio.move_on_after(2 * self._grace_seconds + END_SECONDS):  # the supervisor ends the server
                await process.wait()
            if process.returncode is None or process.returncode < 0:  # the supervisor was killed or stopped
                with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
                    os.killpg(process.pid, signal.SIGKILL)
                with trio.move_on_after(END_SECONDS):
                    await process.wait()

    def last_lines(self) -> str:
        """The last meaningful lines of the server's log since the last start, indented; "" if there are none."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(f"  {line}" for line in meaningful_lines(text))

    # --- starting -----------------------------------------------------------------------------------------------------

    async def _start_on(self, command: ServerCommand, smoke: Smoke, deadline: float) -> bool:
        """Whether the server became ready; False if it ended. Raises ConfigError if it takes too long."""
        await self._open(command)
        reasons = ["it did not answer"]

        async def watch() -> None:
            await self.wait()
            scope.cancel()

        with trio.move_on_at(deadline):
            async with in_background(watch):
                with trio.CancelScope() as scope:
                    await self._until_ready(command.ready_path, smoke, reasons)
            return not self.has_ended  # if it has ended, another process may have answered on its port
        words = self.last_lines()
        raise ConfigError(
            f"{self!r} was not ready after {self._start_seconds:g} seconds ({reasons[-1]}); raise "
            f"--inference.start-seconds, or read {self.log}" + (f", which ends with\n{words}" if words else "")
        )

    async def _until_ready(self, path: str, smoke: Smoke, reasons: list[str]) -> None:
        """Poll until the server answers and generates. After each failed attempt, the reason is appended to
        `reasons`.
        """
        async with HTTPClient(self.url, timeout_seconds=30.0, retries=Retries(attempts_max=1)) as client:
            while True:
                try:
                    await client.get(path, bytes)
                    with trio.move_on_after(SMOKE_SECONDS):
                        await smoke(self.url)
                        return
                    reasons.append(f"it answers, but generated nothing in {SMOKE_SECONDS:g} seconds")
                except InferenceError as error:
                    reasons.append(str(error))
                    await trio.sleep(POLL_SECONDS)

    async def _open(self, command: ServerCommand) -> None:
        env = child_environment(FOR_SERVERS) | command.env
        if self._gpus:
            env["CUDA_VISIBLE_DEVICES"] = self._gpus
        self._process = None
        read_end, self._lifeline = os.pipe()
        try:
            with self._open_log(command) as log:
                self._process = await trio.lowlevel.open_process(
                    supervised(command.argv, read_end, grace_seconds=self._grace_seconds),
                    stdin=subprocess.DEVNULL,
                    stdout=log.fileno(),
                    stderr=subprocess.STDOUT,
                    env=env,
                    pass_fds=(read_end,),
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"{self!r} cannot be started: {error}") from error
        finally:
            os.close(read_end)
            if self._process is None:
                self._close_lifeline()

    def _open_log(self, command: ServerCommand) -> BinaryIO:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log = self.log.open("ab")
        hidden = re.compile("KEY|SECRET|PASSWORD")
        words = [f"{name}={'***' if hidden.search(name) else value}" for name, value in command.env.items()]
        shown = " ".join(words + _without_keys(command.argv))
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {shown}\n".encode())
        log.flush()
        self._log_start = log.tell()
        return log

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _port_was_taken(self) -> bool:
        words = self.last_lines().lower()
        return "address already in use" in words or "errno 98" in words or "port is already" in words

    def _ended(self, seconds: float) -> ConfigError:
        assert self._process is not None and self._process.returncode is not None, "it has ended"
        how, words = _words_of(self._process.returncode), self.last_lines()
        said = (
            f"; its log ends with\n{words}\nthe whole log is {self.log}" if words else f"; its log {self.log} is empty"
        )
        return ConfigError(f"{self!r} ended after {seconds:.0f} seconds, before it was ready ({how}){said}")


@contextlib.asynccontextmanager
async def in_background(task: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run a task during the block. An exception of the block is not wrapped in an exception group."""
    error: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(task)
        try:
            yield
        except Exception as raised:
            error = raised
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error


async def end_of(process: ServerProcess) -> str:
    """Wait until a server has ended. Returns how it ended, with the last lines of its log."""
    how = await process.wait()
    words = process.last_lines()
    return f"its process ended ({how})" + (f"; its log ends with\n{words}" if words else "")


def _words_of(status: int) -> str:
    how = words_of_exit(status)
    return f"{how}; was it out of memory?" if "SIGKILL" in how else how


def has_gpu() -> bool:
    """Whether this machine has a GPU. This works without torch, which may not be installed."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any(Path(place).exists() for place in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


# --- reading a log ----------------------------------------------------------------------------------------------------

_COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(  # "(EngineCore pid=17) ERROR 11-21 10:00:00 [core.py:12] ", "[2026-11-21 10:00:00 TP0] "
    r"^(\([\w ]+ ?pid=\d+\) ?)?((CRITICAL|ERROR|WARNING|INFO|DEBUG) [\d:. -]+ \[[^\]]*\] ?)?(\[[\d:. -]+[^\]]*\] )?"
)
_ERROR = re.compile(r"^([\w.]*(Error|Exception|Interrupt|Exit)\b(: .|$)|.*?\berror: )|out of memory|cannot open shared")
_ELSEWHERE = re.compile(r"see root cause above|See stack trace|Traceback \(most recent", re.IGNORECASE)


def meaningful_lines(text: str) -> list[str]:
    """The lines that explain why a server ended: the last distinct error lines; else the last lines.

    >>> meaningful_lines("loading\\nTraceback (most recent call last):\\n  x()\\nValueError: no such flag\\nbye")
    ['ValueError: no such flag']
    """
    # Indentation after the prefix matters: indented lines of a traceback are code.
    lines = [_PREFIX.sub("", _COLORS.sub("", line)).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip() and not line.startswith("--- ")]
    errors = [line for line in lines if _ERROR.search(line) and not _ELSEWHERE.search(line)]
    chosen = list(dict.fromkeys(reversed(errors)))[: LINES_MAX // 2] or lines[::-1][:LINES_MAX]
    return [line.strip()[:400] for line in reversed(chosen)]


def _without_keys(argv: list[str]) -> list[str]:
    """The command with the values of flags such as --api-key replaced by ***."""
    hidden = [False, *(word.startswith("-") and "key" in word for word in argv)]
    return [
        "***" if hide else re.sub(r"^(--[\w-]*key[\w-]*=).*", r"\1***", word)
        for word, hide in zip(argv, hidden[:-1], strict=True)
    ]
