"""The Protocols of a sandbox and of the component that opens it, and what they share: limits and results.

A component (entry-point group `rollouts.sandboxes`) is a class or function with keyword-only settings that returns a
`Sandboxes`. Register it, and a run can choose it: `--sandbox NAME`. All methods block, and are called in worker
threads.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack, runtime_checkable

from rollouts.author_code import authors_code
from rollouts.errors import ConfigError, SignatureError, near_misses, words_of, words_of_exit
from rollouts.plugins.signature import make

SECONDS = 20.0  # how long a command may take; less than the deadline of a tool, so that the tool sees the result


class Result(NamedTuple):
    """What a command did. `exit_code` is 128 + n if signal n killed it. Bytes that are not UTF-8 are replaced.

    `is_cut`: there was more output than is kept, of stdout or of stderr; the first part is kept. `timed_out`,
    `was_killed_for_memory`, `was_killed_for_processes`: it and all processes that it started were killed for this.
    """

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False
    was_killed_for_memory: bool = False
    was_killed_for_processes: bool = False
    is_cut: bool = False

    @property
    def text(self) -> str:
        """What a model can read: stdout and stderr, then why it did not end well.

        >>> Result(1, "3", "no file", is_cut=True).text
        '3\\nno file\\n[the output is longer]\\n[exit code 1]'
        """
        reasons = {
            "took too long": self.timed_out,
            "used too much memory": self.was_killed_for_memory,
            "started too many processes": self.was_killed_for_processes,
        }
        killed = [f"[killed: it {words}]" for words, holds in reasons.items() if holds]
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n"), "[the output is longer]" if self.is_cut else ""]
        parts += killed or ([f"[{words_of_exit(self.exit_code)}]"] if self.exit_code else [])
        return "\n".join(part for part in parts if part)


class LowerLimits(TypedDict, total=False):
    """Limits of one command that are lower than those of the sandbox."""

    cpu_seconds: float
    memory_gib: float
    file_mib: float
    processes: int
    output_kib: float


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a sandbox and of each command in it. A command may have lower ones, never higher ones.

    Args:
        cpu_seconds: CPU seconds of one process
        memory_gib: memory of all processes together
        file_mib: size of one file that a process writes
        processes: processes at the same time
        output_kib: how much of stdout, and how much of stderr, is kept; the rest is dropped
        ttl_seconds: a sandbox that is still open after this time ends by itself
        starts_max: how many sandboxes may start at the same time; the others wait
    """

    cpu_seconds: float = 60.0
    memory_gib: float = 2.0
    file_mib: float = 256.0
    processes: int = 64
    output_kib: float = 64.0
    ttl_seconds: float = 3600.0
    starts_max: int = 8

    def check(self) -> None:
        """Raise ConfigError for a limit that is not above 0."""
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise ConfigError(f"--sandbox.{name.replace('_', '-')} {value}: expected a number above 0")

    def lowered(self, lower: Mapping[str, Any]) -> SandboxLimits:
        """These limits, with those of a command where they are lower. Raises TypeError for an unknown name.

        >>> SandboxLimits(memory_gib=2.0).lowered({"memory_gib": 0.5, "cpu_seconds": 1000}).memory_gib
        0.5
        """
        if unknown := [name for name in lower if name not in LowerLimits.__annotations__]:
            near = near_misses(unknown[0], LowerLimits.__annotations__)
            hint = f"; did you mean {near[0]}?" if near else ""
            known = ", ".join(LowerLimits.__annotations__)
            raise TypeError(f"exec has no limit {unknown[0]!r}; it has seconds, {known}{hint}")
        values = {name: min(value, getattr(self, name)) for name, value in lower.items()}
        return dataclasses.replace(self, **values)


class Sandbox(Protocol):
    """One open sandbox. It runs one command at a time: a second one waits. When a command ends, the processes that it
    started end too. Its files remain until the sandbox is closed.

    Every method raises SandboxLostError if the sandbox does not exist any more.
    """

    @property
    def lost(self) -> str:
        """Why the sandbox was lost; "" while it works, and after `close`."""
        ...

    def exec(
        self,
        command: Sequence[str] | str,
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = "",
        seconds: float = SECONDS,
        **lower: Unpack[LowerLimits],
    ) -> Result:
        """Run a command in the workspace: a list of arguments, or a text for `sh -c`. `files` are written before.

        A command that fails, is killed or does not exist is a Result, not an exception.
        """
        ...

    def read(self, path: str) -> bytes:
        """The content of a file; a relative path begins at the workspace. Raises OSError if there is no such file, and
        ValueError for a path outside of the workspace, also through a link.
        """
        ...

    def write(self, path: str, data: str | bytes) -> None:
        """Write a file, and make the folders above it. Raises like `read`."""
        ...

    def close(self) -> None:
        """End all processes and remove all files. Also called for a lost sandbox, more than once, and while another
        thread runs a command, which then raises SandboxLostError.
        """
        ...


@runtime_checkable
class ImageSandbox(Sandbox, Protocol):
    """A sandbox whose files can be those of another image, so that each task of an environment may have its own."""

    def use_image(self, image: str) -> None:
        """Begin again with the files of an image, which is a name, or the path of a folder with a Dockerfile. The files
        that the sandbox had are removed. A folder is built once, and again when it changes.

        Raises ConfigError if there is no such image or if the folder cannot be built, and SandboxError if the sandbox
        cannot be opened with it.
        """
        ...


@runtime_checkable
class LocalSandbox(Sandbox, Protocol):
    """A sandbox of this machine. Its commands can reach a program of this machine at 127.0.0.1, or at a Unix socket."""

    @property
    def socket_folder(self) -> str:
        """The folder of this machine in which a Unix socket is opened for commands without the network of this machine:
        the workspace. "": they have that network.
        """
        ...


@runtime_checkable
class Sandboxes(Protocol):
    """Opens sandboxes. `words` says in one line what a sandbox is; `not_stopped` says, in a few plain words each, what
    it does not stop. Both are shown by a dry run.
    """

    words: str
    not_stopped: Sequence[str]

    def check(self) -> None:
        """Raise ConfigError if no sandbox can be opened on this machine, and say what to type. Called before a model
        loads.
        """
        ...

    def open(self) -> Sandbox:
        """A new, empty sandbox. Called in several threads. Raises SandboxError if it cannot be opened."""
        ...


def as_bytes(data: str | bytes) -> bytes:
    """Text as UTF-8.

    >>> as_bytes("a"), as_bytes(b"b")
    (b'a', b'b')
    """
    return data.encode() if isinstance(data, str) else data


def arguments_of(command: Sequence[str] | str) -> list[str]:
    """The arguments of a command. Raises TypeError if it is neither a text nor a list of texts.

    >>> arguments_of("ls | wc"), arguments_of(["ls", "-l"])
    (['/bin/sh', '-c', 'ls | wc'], ['ls', '-l'])
    """
    if isinstance(command, str):
        return ["/bin/sh", "-c", command]
    arguments = list(command)
    if not arguments or not all(isinstance(each, str) for each in arguments):
        raise TypeError(f"a command is a text, or a list of texts that is not empty; got {command!r}")
    return arguments


# --- from a component to the sandbox of one episode -------------------------------------------------------------------


TRY = ["true"]
TRY_SECONDS = 60.0


def make_sandboxes(name: str, component: Any, settings: Mapping[str, Any], concurrency: int) -> Sandboxes:
    """The sandboxes of a component, checked. Raises UserError."""
    made = make("sandbox", name, component, {"concurrency": concurrency}, settings)
    if not isinstance(made, Sandboxes):
        lacks = [each for each in ("words", "not_stopped", "check", "open") if not hasattr(made, each)]
        raise SignatureError(f"the sandbox {name} made {type(made).__name__}, which has no {', '.join(lacks)}")
    made.check()
    return made


def try_sandbox(name: str, sandboxes: Sandboxes) -> None:
    """Open a sandbox, and run `true` in it. Raises ConfigError."""
    try:
        with authors_code():
            sandbox: Sandbox = sandboxes.open()
            try:
                result = sandbox.exec(TRY, seconds=TRY_SECONDS)
            finally:
                sandbox.close()
    except Exception as error:  # any package's sandbox may raise anything
        raise ConfigError(f"--sandbox {name}: {words_of(error)}") from error
    if result.exit_code:
        raise ConfigError(f"--sandbox {name}: the command `true` failed: {result.text}")


class Lease:
    """Holds at most one sandbox. `open` may still run in its thread when the task that waited for it is cancelled; the
    sandbox that it gets after `close` is closed at once. `lost` says why the sandbox was lost; "" if it was not. It is
    complete after `close`.
    """

    def __init__(self, sandboxes: Sandboxes) -> None:
        self.sandbox: Sandbox | None = None
        self.lost = ""
        self._sandboxes = sandboxes
        self._is_closed = False
        self._lock = threading.Lock()

    def open(self) -> Sandbox:
        """Open the sandbox. Raises SandboxError."""
        sandbox = self._sandboxes.open()
        with self._lock:
            self.sandbox = sandbox
            is_closed = self._is_closed
        if is_closed:
            sandbox.close()
        return sandbox

    def close(self) -> None:
        """Close the sandbox, if there is one."""
        with self._lock:
            self._is_closed = True
            sandbox = self.sandbox
        if sandbox is not None:
            self.lost = sandbox.lost
            sandbox.close()
