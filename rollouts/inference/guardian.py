"""The process between us and a model server: it starts the server, and sees to it that the server ends with us.

    python -I -S guardian.py LIFELINE OWNER GRACE COMMAND...

`LIFELINE` is a pipe that nobody writes to: it closes with its owner, the process `OWNER`, however that one ends. Then,
or when it is told to end, the guardian asks the server to end (SIGTERM), and kills after `GRACE` seconds whatever is
left of it: its group, and on Linux also processes that have left the group. It exits as the server did. Run by its
path, it imports nothing of rollouts and costs a few milliseconds; nothing of it is imported elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

__all__ = ["main"]

LOOK_SECONDS = 0.5  # how often it sees whether its owner lives, should something else hold the pipe open
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(lifeline: int, owner: int, grace: float, command: list[str]) -> int:
    """Run the command to its end, or to ours."""
    wake, waker = os.pipe()  # signals are heard in `select`
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _told)
    os.set_inheritable(lifeline, False)
    prctl = _prctl()
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # the server's orphans become ours, so that they can be found
    server = subprocess.Popen(command, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    while server.poll() is None and not _ended and os.getppid() == owner:
        ready, _, _ = select.select([lifeline, wake], [], [], LOOK_SECONDS)
        if lifeline in ready:
            break
        if wake in ready:
            os.read(wake, 4096)
    _end(server, grace)
    code = server.returncode
    return 1 if code is None else code if code >= 0 else 128 - code


_ended: list[int] = []


def _told(number: int, _: object) -> None:
    if number != signal.SIGCHLD:
        _ended.append(number)


def _end(server: subprocess.Popen[bytes], grace: float) -> None:
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(grace)
    deadline = time.monotonic() + grace  # what cannot be killed is left, rather than waited for
    while time.monotonic() < deadline and (found := _descendants() or ([server.pid] if server.poll() is None else [])):
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        if server.poll() is not None:  # before that, its own exit status could be taken here
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    server.poll()
    if sys.platform != "linux":
        os.killpg(0, signal.SIGKILL)


def _descendants() -> list[int]:
    """All processes beneath this one, those that are dead and not waited for excluded; none where there is no /proc."""
    parents: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{int(name)}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    parents[int(name)] = int(fields[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _prctl() -> Callable[[int, int], int]:
    if sys.platform != "linux":
        return lambda option, value: 0
    import ctypes

    function: Callable[[int, int], int] = ctypes.CDLL(None).prctl
    return function


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
