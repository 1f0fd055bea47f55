"""Sandboxes that a process keeps, and the sandbox `subprocess`: a temporary folder, and limits of the operating system.
Subclass `KeptSandboxes` to put a program such as `bwrap` in front of every command.

The keeper (`keeper.py`, under the supervisor) has the sandbox's folder and runs its commands. It ends when the sandbox
is closed, at its time to live, and when this process ends for any reason, also by SIGKILL. If a command kills the
keeper, the supervisor kills the rest.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import os
import secrets
import select
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Unpack

from rollouts.child_environment import child_environment
from rollouts.errors import SandboxError, SandboxLostError, words_of_exit
from rollouts.sandboxes import keeper
from rollouts.sandboxes.base import SECONDS, LowerLimits, Result, SandboxLimits, arguments_of, as_bytes
from rollouts.supervisor import supervised

START_SECONDS = 60.0  # how long the keeper may take to start
GRACE_SECONDS = 5.0  # how long the keeper may take to kill its command and to remove the folder
ANSWER_SECONDS = keeper.KILL_SECONDS + 20.0  # how long an answer may take after the deadline of a command
_CHUNK = 1 << 16


class KeptSandboxes:
    """Opens sandboxes that a keeper keeps. A subclass gives `words`, `not_stopped` and, if its commands do not run as
    plain processes, `enclosed`.

    Args:
        limits: the limits of each sandbox
    """

    words = ""
    not_stopped: Sequence[str] = ()
    inside = ""
    """The path of the workspace for commands; "": its path on this machine, which output shows as relative paths."""
    own_network = False
    """Whether commands cannot reach the network of this machine."""
    own_processes = 0
    """How many processes belong to the program in front of a command."""

    def __init__(self, *, limits: SandboxLimits = SandboxLimits()) -> None:
        limits.check()
        self.limits = limits
        self._starts = threading.BoundedSemaphore(int(limits.starts_max))

    def check(self) -> None:
        """Everything that is needed is part of Python."""

    def open(self) -> KeptSandbox:
        """A new sandbox, when fewer than `starts_max` others start. Raises SandboxError."""
        with self._starts:
            return KeptSandbox(self)

    def enclosed(self, argv: list[str], folder: str) -> list[str]:
        """The command that runs `argv` in the sandbox. `folder` has the folders `workspace` and `tmp`."""
        return argv

    def variables(self, folder: str) -> dict[str, str]:
        """The environment variables of a command."""
        return {**child_environment(), "HOME": f"{folder}/workspace", "TMPDIR": f"{folder}/tmp"}


class SubprocessSandboxes(KeptSandboxes):
    """Commands as plain processes in a temporary folder, with limits. They can read and write all files of the user,
    read the environment variables of the run, and use the network: for code that may be wrong, not for code that may be
    hostile.

    Args:
        limits: the limits of each sandbox
    """

    words = "plain processes in a temporary folder, with limits of time, memory, processes, file size and output"
    not_stopped = (
        "reading and writing files outside of the workspace",
        "the network",
        "killing other processes of the user, also this run",
        "reading the environment variables of this run, with their secrets; --sandbox bubblewrap stops all of these",
    )


class KeptSandbox:
    """A sandbox with a keeper; the Protocol `Sandbox` describes its methods."""

    def __init__(self, kind: KeptSandboxes) -> None:
        parent = os.path.realpath(tempfile.gettempdir())
        self.folder = f"{parent}/rollouts-sandbox-{secrets.token_hex(8)}"
        self.workspace = f"{self.folder}/workspace"
        self._kind, self._ends = kind, time.monotonic() + kind.limits.ttl_seconds
        self._lost, self._is_closed = "", False
        self._commands, self._closing = threading.Lock(), threading.Lock()
        command = [sys.executable, "-I", "-S", keeper.__file__, self.folder, str(kind.limits.ttl_seconds)]
        lifeline, _ = _lifeline()
        try:
            self._keeper = subprocess.Popen(
                supervised(command, lifeline, grace_seconds=GRACE_SECONDS),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[lifeline],
                env=child_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"no process could be started for a sandbox: {error}") from error
        try:
            self._answer(START_SECONDS)
        except SandboxLostError as error:
            raise SandboxError(f"the sandbox did not start in {parent}: {error}") from error

    @property
    def lost(self) -> str:
        """Why the sandbox was lost; "" while it works, and after `close`."""
        return self._lost

    @property
    def socket_folder(self) -> str:
        """Where a Unix socket leads out of the sandbox; see `LocalSandbox`."""
        return self.workspace if self._kind.own_network else ""

    def exec(
        self,
        command: Sequence[str] | str,
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = "",
        seconds: float = SECONDS,
        **lower: Unpack[LowerLimits],
    ) -> Result:
        """Run a command; see `Sandbox.exec`."""
        limits = self._kind.limits.lowered(lower)
        request = {
            "argv": self._kind.enclosed(arguments_of(command), self.folder),
            "cwd": self.workspace,
            "variables": self._kind.variables(self.folder),
            "stdin": base64.b64encode(as_bytes(stdin)).decode(),
            "seconds": seconds,
            "limits": dataclasses.asdict(limits),
            "own_processes": self._kind.own_processes,
        }
        with self._commands:
            self._check()
            for path, data in (files or {}).items():
                write_file(self.workspace, path, as_bytes(data), self._kind.inside)
            answer = self._ask(request, seconds)
        stdout, stderr = (self._text(base64.b64decode(each)) for each in answer["output"])
        killed = answer["killed"]
        return Result(
            answer["exit_code"],
            stdout,
            stderr,
            timed_out=killed == "time",
            was_killed_for_memory=killed == "memory",
            was_killed_for_processes=killed == "processes",
            is_cut=answer["is_cut"],
        )

    def read(self, path: str) -> bytes:
        """The content of a file; see `Sandbox.read`."""
        with self._commands:
            self._check()
            return read_file(self.workspace, path, int(self._kind.limits.file_mib * keeper.MIB), self._kind.inside)

    def write(self, path: str, data: str | bytes) -> None:
        """Write a file; see `Sandbox.write`."""
        with self._commands:
            self._check()
            write_file(self.workspace, path, as_bytes(data), self._kind.inside)

    def close(self) -> None:
        """End the keeper, which kills the command in progress and removes the folder; see `Sandbox.close`."""
        self._is_closed = True
        self._end()

    def _text(self, output: bytes) -> str:
        """The output as text. Where commands see the folder's random path, they show it, and one seed would not give
        one text: so these paths become relative.
        """
        if not self._kind.inside:
            output = output.replace(f"{self.workspace}/".encode(), b"").replace(self.workspace.encode(), b".")
        return output.decode(errors="replace")

    def _check(self) -> None:
        """Raise SandboxLostError if the sandbox is not open, or if its keeper has ended."""
        if self._is_closed:
            raise SandboxLostError("the sandbox is closed")
        if self._lost or self._keeper.poll() is not None:
            self._lose("")

    def _ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._keeper.stdin is not None, "it was started with pipes"
        try:
            self._keeper.stdin.write(json.dumps(request).encode() + b"\n")
            self._keeper.stdin.flush()
        except (OSError, ValueError):  # the pipe is broken, or `close` has closed it
            self._lose("")
        return self._answer(seconds + ANSWER_SECONDS)

    def _answer(self, seconds: float) -> dict[str, Any]:
        """The next answer of the keeper. Raises SandboxLostError."""
        assert self._keeper.stdout is not None, "it was started with pipes"
        deadline, line = time.monotonic() + seconds, bytearray()
        try:
            poll, descriptor = select.poll(), self._keeper.stdout.fileno()
            poll.register(descriptor, select.POLLIN)
            while not line.endswith(b"\n"):
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    self._lose(f"it did not answer in {seconds:g} s")
                chunk = os.read(descriptor, _CHUNK)
                if not chunk:
                    self._lose("")
                line += chunk
        except (OSError, ValueError):  # `close` has closed the pipe
            self._lose("")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _lose(self, why: str) -> NoReturn:
        """Raise SandboxLostError, and remember why; "": because the keeper has ended."""
        if self._is_closed:
            raise SandboxLostError("the sandbox was closed while a command ran")
        if not self._lost:
            if time.monotonic() >= self._ends - 1:
                seconds = self._kind.limits.ttl_seconds
                why = f"its time to live of {seconds:g} s is over; raise --sandbox.ttl-seconds"
            self._end()
            self._lost = f"the sandbox was lost: {why or f'its keeper ended ({words_of_exit(self._keeper.poll())})'}"
        raise SandboxLostError(self._lost)

    def _end(self) -> None:
        """End the keeper and its supervisor, and wait for them."""
        with self._closing:
            process = self._keeper
            assert process.stdin is not None and process.stdout is not None, "it was started with pipes"
            with contextlib.suppress(OSError):  # what is not written is for a keeper that has ended
                process.stdin.close()
            for end in (process.terminate, process.kill):
                try:
                    process.wait(GRACE_SECONDS + keeper.KILL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    end()
            process.wait()
            process.stdout.close()
            keeper.remove(self.folder)  # the keeper may have been killed


@functools.cache
def _lifeline() -> tuple[int, int]:
    """A pipe that closes when this process ends."""
    return os.pipe()


# --- files ------------------------------------------------------------------------------------------------------------


LINKS_MAX = 40
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: opening a named pipe must not wait


def read_file(workspace: str, path: str, bytes_max: int, inside: str = "") -> bytes:
    """The content of a file. `inside` is the path of the workspace for commands ("": the same as outside).

    Raises OSError if there is no such file, and ValueError if it is outside of the workspace, not a regular file, or
    larger than `bytes_max`.
    """
    with open(_opened(workspace, path, inside, os.O_RDONLY), "rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise ValueError(f"{path} is larger than {bytes_max} bytes")
    return data


def write_file(workspace: str, path: str, data: bytes, inside: str = "") -> None:
    """Write a file, and make the folders above it. Raises OSError, and ValueError as `read_file` does."""
    with open(_opened(workspace, path, inside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)


def _opened(workspace: str, path: str, inside: str, flags: int) -> int:
    parts = _resolved(workspace, path, inside or workspace)
    if not parts:
        raise IsADirectoryError(f"{path} is the workspace itself")
    try:
        if flags & os.O_CREAT:
            os.makedirs(os.path.join(workspace, *parts[:-1]), exist_ok=True)
        descriptor = os.open(os.path.join(workspace, *parts), flags | _FLAGS, 0o644)
    except OSError as error:  # the model may read it, so it names the path in the sandbox
        raise OSError(error.errno, error.strerror, path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return descriptor


def _resolved(workspace: str, path: str, inside: str) -> list[str]:
    """The parts of the path below the workspace, with every link followed. Raises ValueError."""
    pending, done, links = _beneath(path, inside, path), list[str](), 0
    while pending:
        part = pending.pop(0)
        if part == "..":
            if not done:
                raise _outside(path)
            done.pop()
        elif os.path.islink(link := os.path.join(workspace, *done, part)):
            links += 1
            if links > LINKS_MAX:
                raise ValueError(f"{path} has too many links")
            target = os.readlink(link)
            done = [] if target.startswith("/") else done
            pending = [*_beneath(target, inside, path), *pending]
        else:
            done.append(part)
    return done


def _beneath(target: str, inside: str, path: str) -> list[str]:
    """The parts of a path, without the workspace at its beginning. Raises ValueError, which names `path`."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    if not target.startswith("/"):
        return parts
    root = [part for part in inside.split("/") if part]
    if parts[: len(root)] != root:
        raise _outside(path)
    return parts[len(root) :]


def _outside(path: str) -> ValueError:
    return ValueError(f"{path} is outside of the sandbox's workspace")
