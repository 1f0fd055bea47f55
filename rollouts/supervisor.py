"""The process between us and a child of ours: it starts the child, and ends it, and all that it started, with us.

    python -I -S supervisor.py LIFELINE OWNER GRACE COMMAND...          # as `supervised` gives it

A model server and the worker of isolated tools run under it; it runs nothing of theirs. `LIFELINE` is a pipe without a
writer: it closes with its owner, the process `OWNER`, however that one ends. Then, or when it is asked to end, the
supervisor asks the child to end (SIGTERM) if it has a grace, and kills after `GRACE` seconds whatever is left. On Linux
it adopts every orphan among its descendants (a child subreaper), also a daemon that has a session of its own; elsewhere
it knows a process group only. It exits as the child did, 128 + n where signal n killed that. Run by its path, it
imports nothing of rollouts and costs a few milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

LOOK_SECONDS = 0.5  # how often it sees whether its owner lives, should something else hold the pipe open
KILL_SECONDS = 4.0  # to kill processes that may still start others, at least
PAUSE_SECONDS = 0.005
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


def supervised(command: list[str], lifeline: int, *, grace_seconds: float = 0.0) -> list[str]:
    """The command that runs `command` under a supervisor of this process. Pass `lifeline` on to it, and start it in a
    session of its own. Without a grace the child has yet another session: to kill its own group spares the supervisor.
    """
    arguments = __file__, lifeline, os.getpid(), grace_seconds
    return [sys.executable, "-I", "-S", *map(str, arguments), *command]


def status_of(code: int | None) -> int | None:
    """The child's exit status, as `subprocess` gives it, from the code that its supervisor exited with.

    >>> status_of(3), status_of(128 + 9), status_of(255)
    (3, -9, 255)
    """
    return 128 - code if code is not None and 128 < code <= 128 + 64 else code


def main(lifeline: int, owner: int, grace: float, command: list[str]) -> int:
    """Run the command to its end, or to ours. Gives its exit code."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *ENDING):
        signal.signal(number, lambda *_: None)  # its number is written to `wake`
    os.set_inheritable(lifeline, False)
    lifeline = os.dup(lifeline)  # a low number, as `select` wants: its owner may have many files open
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(
        command, preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL), start_new_session=not grace
    )
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # where they are pipes, they close with the child
        os.dup2(nothing, stream)
    while child.returncode is None and os.getppid() == owner:
        ready, _, _ = select.select([lifeline, woken], [], [], LOOK_SECONDS)
        if lifeline in ready or (woken in ready and not ENDING.isdisjoint(os.read(woken, 512))):
            break
        _reap(child)
    _end(child, grace)
    code = child.returncode
    return 1 if code is None else code if code >= 0 else 128 - code


def _reap(child: subprocess.Popen[bytes]) -> bool:
    """Take the exit status of all that have ended: the child's and its orphans'. Whether any are left."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child.pid:
                child.returncode = os.waitstatus_to_exitcode(found[1])
        return True
    return False


def _end(child: subprocess.Popen[bytes], grace: float) -> None:
    if child.returncode is None and grace:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
    # What cannot be killed is left, rather than waited for. A list of processes may miss one that was just started;
    # the kernel knows whether any are left.
    deadline = time.monotonic() + max(grace, KILL_SECONDS)
    while _reap(child) and time.monotonic() < deadline:
        for pid in _left(child, grace):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)
    if sys.platform != "linux":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(0 if grace else child.pid, signal.SIGKILL)


def _left(child: subprocess.Popen[bytes], grace: float) -> list[int]:
    """All processes beneath this one, also those that are dead and not waited for: other threads of theirs may still
    run. On Linux only; elsewhere the child, and its group, where it has one of its own.
    """
    if sys.platform != "linux":
        return [] if child.returncode is not None else [child.pid] if grace else [-child.pid]
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [each for each, parent in parents.items() if parent == pid]
    return found[1:]


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    # At once: Python resets the handlers of signals while it ends, and a late SIGTERM would hide the child's exit code.
    os._exit(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
