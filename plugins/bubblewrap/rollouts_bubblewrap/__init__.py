"""The sandbox `bubblewrap`: every command in namespaces of its own, made by the program `bwrap`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from rollouts.errors import ConfigError
from rollouts.sandboxes import KeptSandboxes, SandboxLimits

__all__ = ["BubblewrapSandboxes"]

LIMITS = SandboxLimits()
CHECK_SECONDS = 30.0
INSTALL = "type: apt-get install bubblewrap (or dnf install bubblewrap), or choose another: --sandbox subprocess"

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders with programs and libraries. On most systems, all but /usr are links into it."""

_LIBRARIES = "ld.so.cache ld.so.conf ld.so.conf.d alternatives localtime nsswitch.conf mime.types fonts magic".split()
_CERTIFICATES = "ssl/certs ssl/openssl.cnf ca-certificates pki/tls/certs pki/ca-trust".split()

SETTINGS = tuple(f"/etc/{name}" for name in (*_LIBRARIES, *_CERTIFICATES))
"""Files and folders of /etc that programs read, and that have no secrets."""

OF_THE_KERNEL = tuple(f"/proc/{name}" for name in "sys sysrq-trigger irq bus fs acpi scsi mtrr".split())
"""Files with which root changes the whole machine. They belong to root in every namespace, so root could write them."""

NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/services")
"""What programs read to use the network."""


LIMITED = 'ulimit -u "$0" 2>/dev/null || ulimit -p "$0" 2>/dev/null; exec "$@"'
"""The kernel's own limit of processes, counted in the namespace; it does not apply to root. `-p` is that of dash."""


class BubblewrapSandboxes(KeptSandboxes):
    """Commands without a network, with a read-only system and their own processes, /tmp and /proc. They see the
    workspace as /workspace, and nothing of the user's files.

    Args:
        limits: the limits of each sandbox
        readable: more folders of this machine that commands may read
        folders: more folders that commands may write, such as /app; each is empty at first, and goes with the sandbox
        network: let commands use the network
        program: the program: a name or a path
    """

    words = "namespaces of the kernel: no network, a read-only system, its own processes, /tmp and /proc"
    inside = "/workspace"
    own_processes = 2  # bwrap itself, and the first process of the namespace

    def __init__(
        self,
        *,
        limits: SandboxLimits = LIMITS,
        readable: Sequence[str] = (),
        folders: Sequence[str] = (),
        network: bool = False,
        program: str = "bwrap",
    ) -> None:
        super().__init__(limits=limits)
        self._program, self.own_network = program, not network
        self.not_stopped = (
            *(("the network, because of --sandbox.network",) if network else ()),
            "bugs of the kernel",
            "many files that fill the disk",
        )
        self._folders = tuple(map(_checked_folder, folders))
        shown = [*readable, sys.base_prefix, sys.prefix]
        missing = [folder for folder in readable if not os.path.isdir(folder)]
        if missing:
            raise ConfigError(f"--sandbox.readable {missing[0]}: there is no such folder")
        self._arguments = [
            *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *(("--share-net",) if network else ()),
            *_system(),
            *("--proc", "/proc", "--dev", "/dev"),
            *(_bound(OF_THE_KERNEL, try_each=True) if os.geteuid() == 0 else ()),
            *_bound([*SETTINGS, *(NETWORK if network else ())], try_each=True),
        ]
        self._readable = _bound([os.path.abspath(folder) for folder in shown])

    def check(self) -> None:
        """Raise ConfigError if `bwrap` is not installed, or if the system does not let it make namespaces."""
        if shutil.which(self._program) is None:
            raise ConfigError(f"--sandbox bubblewrap: the program {self._program!r} is not installed\n{INSTALL}")
        command = [self._program, *self._arguments, "/usr/bin/true"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"--sandbox bubblewrap: {self._program} does not run: {error}\n{INSTALL}") from error
        if done.returncode:
            raise ConfigError(
                f"--sandbox bubblewrap: {self._program} cannot make a sandbox here: {done.stderr.strip()}\n"
                "the system must allow user namespaces (sysctl user.max_user_namespaces, "
                "kernel.apparmor_restrict_unprivileged_userns); or choose another: --sandbox subprocess"
            )

    def enclosed(self, argv: list[str], folder: str) -> list[str]:
        """The command that runs `argv` in bubblewrap."""
        own = {path: f"{folder}/folders{path}" for path in self._folders}  # out of reach of commands, so no link
        for source in own.values():
            os.makedirs(source, exist_ok=True)
        mounts = [
            *("--bind", f"{folder}/tmp", "/tmp", "--bind", f"{folder}/tmp", "/dev/shm"),
            *(part for path, source in own.items() for part in ("--bind", source, path)),
            *self._readable,  # after /tmp, because such a folder may be in it
            *("--bind", f"{folder}/workspace", self.inside, "--chdir", self.inside),
            *("--remount-ro", "/dev", "--remount-ro", "/"),
        ]
        limited = ("/bin/sh", "-c", LIMITED, str(int(self.limits.processes)))
        return [self._program, *self._arguments, *mounts, "--", *limited, *argv]

    def variables(self, folder: str) -> dict[str, str]:
        """The environment variables of a command, with the paths that it sees."""
        return {**super().variables(folder), "HOME": self.inside, "TMPDIR": "/tmp", "PWD": self.inside}


def _checked_folder(path: str) -> str:
    """A folder of `folders`. Raises ConfigError."""
    taken = (*SYSTEM, "/etc", "/proc", "/dev", "/sys", "/tmp", BubblewrapSandboxes.inside)
    if not path.startswith("/") or os.path.normpath(path) != path or path == "/":
        raise ConfigError(f"--sandbox.folders {path}: expected an absolute path, such as /app")
    if any(f"{path}/".startswith(f"{other}/") for other in taken):
        raise ConfigError(f"--sandbox.folders {path}: commands see this folder already")
    return path


def _system() -> list[str]:
    """The mounts of the system's folders: a link stays a link, a folder is read-only."""
    arguments = []
    for path in SYSTEM:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    return arguments


def _bound(paths: Sequence[str], try_each: bool = False) -> list[str]:
    """Read-only mounts of these paths at the same place, without those in /usr."""
    how = "--ro-bind-try" if try_each else "--ro-bind"
    own = [path for path in dict.fromkeys(paths) if not f"{path}/".startswith("/usr/")]
    return [part for path in own for part in (how, path, path)]
