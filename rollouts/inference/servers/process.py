"""A model server started here: on a free port and chosen GPUs, with a log, ended with the run, however that one ends.

    process = ServerProcess(lambda port: serve_command(python, model, port, options), name="vllm-0", folder=folder)
    await process.start(smoke)          # it answers, and `smoke(url)` has generated something
    ... process.url ...
    await process.end()

A supervisor (`rollouts.supervisor`) ends the server, and all that the server started, when we say so and when this
process is gone, be it by SIGKILL. Left out: what is asked of it (`vllm`, `sglang`), and
starting it again (`server`).
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
from rollouts.inference.servers.http import PlainClient, Retries
from rollouts.supervisor import status_of, supervised

GRACE_SECONDS = 10.0  # until a server that was asked to end is killed
END_SECONDS = 5.0  # until what was killed is gone
LOOK_SECONDS = 0.25  # how often a server that starts is asked whether it is ready
SMOKE_SECONDS = 120.0  # for the first generation: some engines compile in it
PORTS_MAX = 4  # ports that are tried
TAIL_BYTES = 1 << 23  # an engine that dies may print all that it was working on
LINES_MAX = 6

Smoke = Callable[[str], Awaitable[None]]
"""Given the URL: generates something, or raises InferenceError (not yet) or ConfigError (never)."""


class ServerCommand(NamedTuple):
    """How a server is started: `env` comes on top of what every child process gets (`child_environment`). It answers
    `ready_path` with 200 when it has loaded.
    """

    argv: list[str]
    env: dict[str, str]
    ready_path: str = "/health"


class ServerProcess:
    """One server. `command` is asked for its command with a free port, again where the port was taken meanwhile.

    `gpus` (such as "0,1") becomes CUDA_VISIBLE_DEVICES; empty: as it is. Output goes to `<folder>/servers/<name>.log`,
    after what it holds. It can be started again after it has ended. Cancellation of `start` leaves no process.
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
        """It does not run: not yet, or no more."""
        return self._process is None or self._process.poll() is not None

    async def wait(self) -> str:
        """Until it has ended; says how, in words."""
        assert self._process is not None, "start it first"
        return _words_of(await self._process.wait())

    async def start(self, smoke: Smoke) -> None:
        """Start it and wait until it answers and `smoke(url)` works.

        Raises ConfigError: it ended before, or was not ready within `start_seconds`; with the last meaningful lines of
        its log, and where that is. What `smoke` raises as a UserError is raised as it is. Nothing runs then.
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
        """End it: asked first, then killed, with everything that it started. Also where this is cancelled: it takes
        `grace_seconds`, and a few more, at most. Harmless where nothing runs.
        """
        if self._process is None:
            return
        process = self._process
        self._close_lifeline()
        with trio.CancelScope(shield=True):
            with trio.move_on_after(2 * self._grace_seconds + END_SECONDS):  # the supervisor does it
                await process.wait()
            if process.returncode is None or process.returncode < 0:  # somebody has killed or stopped the supervisor
                with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
                    os.killpg(process.pid, signal.SIGKILL)
                with trio.move_on_after(END_SECONDS):
                    await process.wait()

    def last_lines(self) -> str:
        """The last meaningful lines of its log since it was last started, indented; "" where there are none."""
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
        """Whether it became ready; False where it ended. Raises ConfigError where it takes too long."""
        await self._open(command)
        reasons = ["it did not answer"]

        async def watch() -> None:
            await self.wait()
            scope.cancel()

        with trio.move_on_at(deadline):
            async with background(watch):
                with trio.CancelScope() as scope:
                    await self._until_ready(command.ready_path, smoke, reasons)
            return not self.has_ended  # if it has, somebody else may have answered, on a port that was not free
        words = self.last_lines()
        raise ConfigError(
            f"{self!r} was not ready in {self._start_seconds:g} seconds ({reasons[-1]}); give it "
            f"--inference.start-seconds, or see {self.log}" + (f", which ends with\n{words}" if words else "")
        )

    async def _until_ready(self, path: str, smoke: Smoke, reasons: list[str]) -> None:
        """Ask until it answers and has generated; `reasons` gets why it has not."""
        async with PlainClient(self.url, timeout_seconds=30.0, retries=Retries(attempts_max=1)) as client:
            while True:
                try:
                    await client.get(path, bytes)
                    with trio.move_on_after(SMOKE_SECONDS):
                        await smoke(self.url)
                        return
                    reasons.append(f"it answers, and generated nothing in {SMOKE_SECONDS:g} seconds")
                except InferenceError as error:
                    reasons.append(str(error))
                    await trio.sleep(LOOK_SECONDS)

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
        said = f"; its log ends with\n{words}\nall of it is in {self.log}" if words else f"; it left {self.log} empty"
        return ConfigError(f"{self!r} ended after {seconds:.0f} seconds, before it was ready ({how}){said}")


@contextlib.asynccontextmanager
async def background(task: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """The task runs beside the block, and ends with it; what the block raises is not put in a group."""
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
    """Waits until a server has ended, and says why, with the last lines of its log."""
    how = await process.wait()
    words = process.last_lines()
    return f"its process ended ({how})" + (f"; its log ends with\n{words}" if words else "")


def _words_of(status: int) -> str:
    how = words_of_exit(status_of(status))
    return f"{how}: was it out of memory?" if how == "SIGKILL" else how


def has_gpu() -> bool:
    """Without torch: it may not be installed here."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any(Path(place).exists() for place in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def free_port() -> int:
    """A loopback port that is free at the moment."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


# --- what a log says --------------------------------------------------------------------------------------------------

_COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(  # "(EngineCore pid=17) ERROR 11-21 10:00:00 [core.py:12] ", "[2026-11-21 10:00:00 TP0] "
    r"^(\([\w ]+ ?pid=\d+\) ?)?((CRITICAL|ERROR|WARNING|INFO|DEBUG) [\d:. -]+ \[[^\]]*\] ?)?(\[[\d:. -]+[^\]]*\] )?"
)
_ERROR = re.compile(r"^([\w.]*(Error|Exception|Interrupt|Exit)\b(: .|$)|.*?\berror: )|out of memory|cannot open shared")
_ELSEWHERE = re.compile(r"see root cause above|See stack trace|Traceback \(most recent", re.IGNORECASE)


def meaningful_lines(text: str) -> list[str]:
    """The lines that say why a server ended: the errors that it names last, each once; else its last lines.

    >>> meaningful_lines("loading\\nTraceback (most recent call last):\\n  x()\\nValueError: no such flag\\nbye")
    ['ValueError: no such flag']
    """
    # Behind the prefix indentation counts: what is indented in a traceback is code.
    lines = [_PREFIX.sub("", _COLORS.sub("", line)).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip() and not line.startswith("--- ")]
    errors = [line for line in lines if _ERROR.search(line) and not _ELSEWHERE.search(line)]
    chosen = list(dict.fromkeys(reversed(errors)))[: LINES_MAX // 2] or lines[::-1][:LINES_MAX]
    return [line.strip()[:400] for line in reversed(chosen)]


def _without_keys(argv: list[str]) -> list[str]:
    """The command without what follows a flag that names a key."""
    hidden = [False, *(word.startswith("-") and "key" in word for word in argv)]
    return [
        "***" if hide else re.sub(r"^(--[\w-]*key[\w-]*=).*", r"\1***", word)
        for word, hide in zip(argv, hidden[:-1], strict=True)
    ]
