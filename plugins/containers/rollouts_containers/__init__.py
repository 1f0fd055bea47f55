"""The sandboxes `podman` and `docker`: a container for each episode. Both programs take the same commands."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, Unpack

from rollouts.child_environment import child_environment
from rollouts.errors import ConfigError, SandboxError, SandboxLostError
from rollouts.sandboxes import Result, SandboxLimits
from rollouts.sandboxes.base import SECONDS, LowerLimits, arguments_of, as_bytes
from rollouts.sandboxes.keeper import communicate

__all__ = ["ContainerSandbox", "DockerSandboxes", "PodmanSandboxes"]

LIMITS = SandboxLimits()
IMAGE = "docker.io/library/python:3.13-slim"
WORKSPACE = "/workspace"
CLI_SECONDS = 120.0  # how long the program may take to do anything but a command of the model
BUILD_SECONDS = 3600.0  # how long an image may take to build
BUILT = "localhost/rollouts-built"
END_SECONDS = 10.0  # how long a killed command may take to end
VARIABLES = ("DOCKER_*", "CONTAINER_*", "CONTAINERS_*", "REGISTRY_*")  # settings of the programs
MESSAGE_BYTES, BUILD_BYTES = 4096, 1 << 20
OWN_PROCESSES = 4  # init, its child, a shell in front of each command, and one that kills
MIB = 1 << 20

# Stop all processes at once, so that none can start others; kill all but the container's own; let these continue.
KILL = """\
kill -STOP -1 2>/dev/null
for p in /proc/[0-9]*; do
  p=${p#/proc/}
  case " $keep $$ " in *" $p "*) ;; *) kill -9 $p 2>/dev/null ;; esac
done
for p in $keep; do kill -CONT $p 2>/dev/null; done
"""
LIST = "for p in /proc/[0-9]*; do p=${p#/proc/}; test $p = $$ || echo $p; done"  # what a container without commands has
EXEC = f'ulimit -t "$1"; ulimit -f "$2"; keep=$3; shift 3; "$@"; code=$?\n{KILL}exit $code'  # no process stays
KILL_OTHERS = f"keep=$1\n{KILL}exit 0"
_INSIDE = f"case $p in {WORKSPACE}/*) ;; *) exit 97;; esac"
READ = f'p=$(readlink -f "$0") || exit 96; {_INSIDE}; test -e "$p" || exit 96; test -f "$p" || exit 98; exec cat "$p"'
WRITE = (
    f'mkdir -p "${{0%/*}}" || exit 1; p=$(readlink -f "$0") || exit 96; {_INSIDE}; '
    'test ! -e "$p" || test -f "$p" || exit 98; exec cat > "$p"'
)
OOM = "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null"
REMOVE_ALL = (  # when this process ends, its pipe closes; a container that is starting then may come later
    "cat > /dev/null; for i in 1 2 3 4 5 6 7 8 9 10; do "
    '"$0" ps -aq --filter "label=$1" | xargs -r "$0" rm -f -v; sleep 1; done'
)

_lock = threading.Lock()
_reapers: dict[tuple[int, str], subprocess.Popen[bytes]] = {}
_label = f"rollouts={secrets.token_hex(8)}"


class Done(NamedTuple):
    """How a call of the program ended."""

    code: int
    stdout: bytes
    stderr: bytes
    is_cut: bool
    timed_out: bool

    @property
    def words(self) -> str:
        """What it said."""
        return (self.stderr or self.stdout).decode(errors="replace").strip() or f"exit code {self.code}"

    @property
    def last_words(self) -> str:
        """The last line that it said."""
        return "it took too long" if self.timed_out else self.words.splitlines()[-1]


class PodmanSandboxes:
    """A container of podman for each episode: no network, and only the files of an image.

    Args:
        limits: the limits of each sandbox; memory and processes are those of the container
        image: the image; it must be on this machine, and have sh, cat, mkdir, readlink and sleep
        root_file_system: a tar file with the files of the image, instead of `image`
        network: let commands use the network
        options: more arguments of `podman run`
        program: the program: a name or a path
    """

    program = "podman"
    install = "type: apt-get install podman"
    offline = ("--pull=never", "--network=none")
    """Options of a build that must not use the network."""

    def __init__(
        self,
        *,
        limits: SandboxLimits = LIMITS,
        image: str = IMAGE,
        root_file_system: str = "",
        network: bool = False,
        options: Sequence[str] = (),
        program: str = "",
    ) -> None:
        limits.check()
        self.limits = limits
        self.program = program or self.program
        self.words = f"a container of {os.path.basename(self.program)}, with the files of an image only"
        self.not_stopped = (
            *(("the network, because of --sandbox.network",) if network else ()),
            "bugs of the kernel and of the container runtime",
            "many files that fill the disk",
        )
        self._image, self._tar, self._network, self._options = image, root_file_system, network, tuple(options)
        self._starts, self._builds = threading.BoundedSemaphore(int(limits.starts_max)), threading.Lock()
        if root_file_system:
            self._image = f"localhost/rollouts-sandbox:{_digest(root_file_system)}"

    def check(self) -> None:
        """Raise ConfigError if the program or the image is missing, or if no container can be started."""
        flag = f"--sandbox {type(self).program}"
        if shutil.which(self.program) is None:
            raise ConfigError(f"{flag}: the program {self.program!r} is not installed\n{self.install}")
        if (about := self.call("version")).code:
            raise ConfigError(f"{flag}: `{self.program} version` failed: {about.words}\n{self.install}, and start it")
        if self.call("image", "inspect", self._image).code:
            if not self._tar:
                raise ConfigError(
                    f"{flag}: the image {self._image} is not on this machine\n"
                    f"type: {self.program} pull {self._image}, or choose another: --sandbox.image NAME"
                )
            if (made := self.call("import", self._tar, self._image)).code:
                raise ConfigError(f"--sandbox.root-file-system {self._tar} cannot be imported: {made.words}")
        try:
            sandbox = self.open()
            try:
                tried = sandbox.exec(["true"], seconds=CLI_SECONDS)
            finally:
                sandbox.close()
        except SandboxError as error:
            raise ConfigError(f"{flag}: no container can be started: {error}") from error
        if tried.exit_code:
            raise ConfigError(f"{flag}: the command `true` failed in {self._image}: {tried.text}")

    def open(self) -> ContainerSandbox:
        """A new container, when fewer than `starts_max` others start. Raises SandboxError."""
        name = f"rollouts-{secrets.token_hex(8)}"
        self._start_reaper()
        self.start(name)
        sandbox = ContainerSandbox(self, name)
        sandbox.look_first()
        return sandbox

    def start(self, name: str, image: str = "") -> None:
        """Start a container of an image; by default that of the settings. Raises SandboxError."""
        with self._starts:
            done = self.call(*self.run_arguments(name, image))
        if done.code:
            self.call("rm", "-f", "-v", name)
            raise SandboxError(f"{self.program} cannot start a container: {done.words}")

    def image_of(self, image: str) -> str:
        """The name of an image; a folder with a Dockerfile is built. Raises ConfigError."""
        name = f"{BUILT}:{_digest_of_folder(image)}" if os.path.isdir(image) else image
        with self._builds:
            if not self.call("image", "inspect", name).code:
                return name
            if name == image:
                raise ConfigError(f"the image {name} is not on this machine\ntype: {self.program} pull {name}")
            options = () if self._network else self.offline
            done = self.call("build", *options, "-t", name, image, seconds=BUILD_SECONDS, output_bytes=BUILD_BYTES)
        if done.code or done.timed_out:
            raise ConfigError(
                f"the image of {image} cannot be built: {done.last_words}\n"
                "a build uses the network only with --sandbox.network true, and needs the images that it begins with\n"
                f"type: {self.program} build -t {name} {image}"
            )
        return name

    def run_arguments(self, name: str, image: str = "") -> list[str]:
        """The arguments that start a container. It ends by itself at its time to live, and is then removed."""
        limits = self.limits
        memory = f"{max(1, round(limits.memory_gib * 1024))}m"
        return [
            *("run", "-d", "--rm", "--init", "--name", name, "--label", _label),
            *("--pull", "never", "--stop-timeout", "0"),
            *(() if self._network else ("--network", "none")),
            *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(int(limits.processes) + OWN_PROCESSES)),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--volume", WORKSPACE),
            *("--env", f"HOME={WORKSPACE}", "--env", "TMPDIR=/tmp"),
            *self._options,
            *("--entrypoint", "sleep", image or self._image, str(max(1, round(limits.ttl_seconds)))),
        ]

    def call(
        self, *arguments: str, stdin: bytes = b"", seconds: float = CLI_SECONDS, output_bytes: int = MESSAGE_BYTES
    ) -> Done:
        """Call the program. At the deadline it is killed, which does not end a command in the container."""
        try:
            process = subprocess.Popen(
                [self.program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=child_environment(VARIABLES),
                start_new_session=True,
            )
        except OSError as error:
            return Done(127, b"", f"{self.program}: {error.strerror}".encode(), False, False)
        with process:
            try:
                (stdout, stderr), is_cut, killed = communicate(process, stdin, output_bytes, time.monotonic() + seconds)
            finally:
                process.kill()
        return Done(process.returncode, stdout, stderr, is_cut, killed == "time")

    def _start_reaper(self) -> None:
        """Start the process that removes the containers of this process when this process has ended in any way."""
        key = (os.getpid(), self.program)
        with _lock:
            if key not in _reapers:
                _reapers[key] = subprocess.Popen(
                    ["/bin/sh", "-c", REMOVE_ALL, self.program, _label],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=child_environment(VARIABLES),
                    start_new_session=True,
                )


class DockerSandboxes(PodmanSandboxes):
    """A container of docker for each episode: no network, and only the files of an image.

    Args:
        limits: the limits of each sandbox; memory and processes are those of the container
        image: the image; it must be on this machine, and have sh, cat, mkdir, readlink and sleep
        root_file_system: a tar file with the files of the image, instead of `image`
        network: let commands use the network
        options: more arguments of `docker run`
        program: the program: a name or a path
    """

    program = "docker"
    install = "type: apt-get install docker.io"
    offline = ("--network=none",)


class ContainerSandbox:
    """A container; the Protocol `rollouts.sandboxes.Sandbox` describes its methods."""

    def __init__(self, kind: PodmanSandboxes, name: str) -> None:
        self.name = name
        self._kind, self._ends = kind, time.monotonic() + kind.limits.ttl_seconds
        self._lost, self._is_closed, self._ooms = "", False, 0
        self._commands = threading.Lock()
        self._own = ""

    def use_image(self, image: str) -> None:
        """Begin again with the files of an image; see `ImageSandbox.use_image`."""
        name = self._kind.image_of(image)
        with self._commands:
            self._kind.call("rm", "-f", "-v", self.name)
            if not self._is_closed:
                self._kind.start(self.name, name)
        if self._is_closed:  # while it started
            self._kind.call("rm", "-f", "-v", self.name)
        self.look_first()

    def look_first(self) -> None:
        """`look` at a container that has just started. Raises SandboxError if it does not run."""
        try:
            self.look()
        except SandboxLostError as error:
            raise SandboxError(f"{self._kind.program} started a container that does not run: {error}") from error

    def look(self) -> None:
        """Remember the process ids of the container itself. Call it before the first command."""
        self._own = " ".join(self._inside([LIST], b"", CLI_SECONDS, MESSAGE_BYTES).stdout.decode().split())

    @property
    def lost(self) -> str:
        """Why the sandbox was lost; "" while it works, and after `close`."""
        return self._lost

    def exec(
        self,
        command: Sequence[str] | str,
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = "",
        seconds: float = SECONDS,
        **lower: Unpack[LowerLimits],
    ) -> Result:
        """Run a command; see `Sandbox.exec`. Raises ValueError for lower limits of memory or processes, because the
        whole container has one limit.
        """
        for name in ("memory_gib", "processes"):
            if name in lower:
                raise ValueError(f"{name} is a limit of the whole container: --sandbox.{name.replace('_', '-')}")
        limits = self._kind.limits.lowered(lower)
        limited = [str(max(1, round(limits.cpu_seconds))), str(max(1, int(limits.file_mib * 2048)))]  # blocks of 512 B
        with self._commands:
            for path, data in (files or {}).items():
                self._write(path, as_bytes(data))
            done = self._inside(
                [EXEC, "sh", *limited, self._own, *arguments_of(command)],
                as_bytes(stdin),
                seconds,
                int(limits.output_kib * 1024),
            )
            if done.timed_out:
                self._kill()
            was_killed_for_memory = done.code != 0 and not done.timed_out and self._had_no_memory()
        return Result(
            128 + 9 if done.timed_out else done.code,
            done.stdout.decode(errors="replace"),
            done.stderr.decode(errors="replace"),
            timed_out=done.timed_out,
            was_killed_for_memory=was_killed_for_memory,
            is_cut=done.is_cut,
        )

    def read(self, path: str) -> bytes:
        """The content of a file; see `Sandbox.read`."""
        most = int(self._kind.limits.file_mib * MIB)
        with self._commands:
            done = self._inside([READ, _absolute(path)], b"", CLI_SECONDS, most)
        _raise(done, path)
        if done.is_cut:
            raise ValueError(f"{path} is larger than {most} bytes")
        return done.stdout

    def write(self, path: str, data: str | bytes) -> None:
        """Write a file; see `Sandbox.write`."""
        with self._commands:
            self._write(path, as_bytes(data))

    def close(self) -> None:
        """Kill and remove the container; see `Sandbox.close`."""
        if not self._is_closed:
            self._is_closed = True
            self._kind.call("rm", "-f", "-v", self.name)

    def _write(self, path: str, data: bytes) -> None:
        _raise(self._inside([WRITE, _absolute(path)], data, CLI_SECONDS, MESSAGE_BYTES), path)

    def _kill(self) -> None:
        """Kill what a late command has started. If no process can start for that, restart the container; its files
        remain.
        """
        if self._inside([KILL_OTHERS, "sh", self._own], b"", CLI_SECONDS, MESSAGE_BYTES).code:
            restarted = self._kind.call("restart", self.name)
            if restarted.code:
                self._lose(f"a late command could not be killed: {restarted.words}")
            self.look()

    def _inside(self, script: Sequence[str], stdin: bytes, seconds: float, output_bytes: int) -> Done:
        """Run a script of sh with arguments in the container. Raises SandboxLostError."""
        if self._is_closed:
            raise SandboxLostError("the sandbox is closed")
        if self._lost:
            raise SandboxLostError(self._lost)
        arguments = ("exec", "-i", "-w", WORKSPACE, self.name, "/bin/sh", "-c", *script)
        done = self._kind.call(*arguments, stdin=stdin, seconds=seconds, output_bytes=output_bytes)
        if done.code and not self._runs():
            self._lose(done.words)
        return done

    def _runs(self) -> bool:
        state = self._kind.call("inspect", "--format", "{{.State.Running}}", self.name)
        return state.code == 0 and state.stdout.strip() == b"true"

    def _lose(self, why: str) -> NoReturn:
        if self._is_closed:
            raise SandboxLostError("the sandbox was closed while a command ran")
        if time.monotonic() >= self._ends - 1:
            why = f"its time to live of {self._kind.limits.ttl_seconds:g} s is over; raise --sandbox.ttl-seconds"
        self._lost = f"the sandbox was lost: {why}"
        raise SandboxLostError(self._lost)

    def _had_no_memory(self) -> bool:
        """Whether the kernel has killed a process of the container since the last call, because memory was full."""
        counts = self._inside([OOM], b"", CLI_SECONDS, MESSAGE_BYTES).stdout.split()
        ooms = next((int(count) for word, count in itertools.pairwise(counts) if word == b"oom_kill"), 0)
        before, self._ooms = self._ooms, ooms
        return ooms > before


def _absolute(path: str) -> str:
    """The path below the workspace. Raises ValueError if `..` leads out of it."""
    whole = os.path.normpath(os.path.join(WORKSPACE, path))
    if not whole.startswith(f"{WORKSPACE}/"):
        raise ValueError(f"{path} is outside of the sandbox's workspace")
    return whole


def _raise(done: Done, path: str) -> None:
    """Raise what the exit code of READ and WRITE means."""
    if done.code == 97:
        raise ValueError(f"{path} is outside of the sandbox's workspace")
    if done.code == 98:
        raise ValueError(f"{path} is not a regular file")
    if done.code == 96:
        raise FileNotFoundError(2, "No such file or directory", path)
    if done.code or done.timed_out:
        raise OSError(f"{path}: {done.words}")


def _digest(tar: str) -> str:
    """A tag for the image of a tar file: another one when the file changes. Raises ConfigError."""
    try:
        about = os.stat(tar)
    except OSError as error:
        raise ConfigError(f"--sandbox.root-file-system {tar}: {error.strerror}") from error
    return hashlib.sha256(f"{os.path.abspath(tar)} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:16]


def _digest_of_folder(folder: str) -> str:
    """A tag for the image that is built of a folder: another one when a path, a mode or a content changes."""
    found = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*")):
        data = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        about = f"{path.relative_to(folder)} {path.lstat().st_mode:o} {len(data)} "
        found.update(about.encode() + data)
    return found.hexdigest()[:16]
