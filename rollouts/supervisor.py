"""A process that supervises a child process of rollouts. When the owner ends, the supervisor ends the child and all
processes that the child started.

    python -I -S supervisor.py LIFELINE OWNER GRACE COMMAND...          # the command that `supervised` returns

Model servers and workers of isolated tools run under a supervisor. `LIFELINE` is the read end of a pipe to which
nothing is written: it closes when the process `OWNER` ends for any reason. When it closes, or when the supervisor
receives SIGTERM, SIGINT or SIGHUP, the supervisor sends SIGTERM to the child if `GRACE` is not 0, waits at most `GRACE`
seconds, and kills all processes that are left.

On Linux, the supervisor also ends daemons with their own session: it is a child subreaper, so it adopts the orphans
among its descendants. Another supervisor among them, with a `GRACE` of its own, has that time to end its processes. On
other systems it ends only the process group of the child. It exits with the exit code of the child, or with 128 + n if
signal n killed the child. It runs by its path and imports nothing of rollouts, so it starts in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

LOOK_SECONDS = 0.5  # the time between checks that the owner lives, because another process may hold the pipe open
KILL_SECONDS = 4.0  # the shortest deadline for killing processes that start more processes
GRACE_SECONDS_MAX = 60.0  # the longest time that another supervisor may take
PAUSE_SECONDS = 0.005
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


def supervised(command: list[str], lifeline: int, *, grace_seconds: float = 0.0) -> list[str]:
    """The command that runs `command` under a supervisor. Start it in its own session, and let it inherit `lifeline`.
    With `grace_seconds` of 0, the child has its own session, so a child that kills its process group does not kill the
    supervisor.
    """
    arguments = __file__, lifeline, os.getpid(), grace_seconds
    return [sys.executable, "-I", "-S", *map(str, arguments), *command]


def main(lifeline: int, owner: int, grace: float, command: list[str]) -> int:
    """Run the command until it ends or its owner ends. Returns its exit code."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *ENDING):
        signal.signal(number, lambda *_: None)  # Python writes the signal's number to `wake`
    os.set_inheritable(lifeline, False)
    lifeline = os.dup(lifeline)  # `select` needs a low number, and the owner may have many open files
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(
        command, preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL), start_new_session=not grace
    )
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # if these streams are pipes, they close when the child ends
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
    """Collect the exit status of the child and of orphans that ended. Returns whether any of these processes are
    left.
    """
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
    # Repeat until `_reap` finds no process: the list of processes may miss one that has just started. Give up at the
    # deadline, because some processes cannot be killed.
    begun = time.monotonic()
    deadline = begun + max(grace, KILL_SECONDS)
    while _reap(child) and time.monotonic() < deadline:
        left, others = _left(child, grace, time.monotonic() - begun)
        deadline = max([deadline, *(begun + seconds + KILL_SECONDS for seconds in others.values())])
        for pid in (*left, *others):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM if pid in others else signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)
    if sys.platform != "linux":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(0 if grace else child.pid, signal.SIGKILL)


def _left(child: subprocess.Popen[bytes], grace: float, passed: float) -> tuple[list[int], dict[int, float]]:
    """The processes to kill, and other supervisors that still have time, each with its seconds. On Linux: all
    descendants, also zombies, because their other threads may still run. On other systems: the child or its process
    group.
    """
    if sys.platform != "linux":
        return [] if child.returncode is not None else [child.pid] if grace else [-child.pid], {}
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found, others = [os.getpid()], dict[int, float]()
    for pid in found:
        if pid != found[0] and passed < (seconds := _seconds_of_supervisor(pid)):
            others[pid] = seconds
        else:
            found += [each for each, parent in parents.items() if parent == pid]
    return [pid for pid in found[1:] if pid not in others], others


def _seconds_of_supervisor(pid: int) -> float:
    """How long this process may take to end its own processes; 0 if it is no supervisor with a grace."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().split(b"\0")
        if words[1:3] == [b"-I", b"-S"] and os.path.basename(words[3]) == os.path.basename(os.fsencode(__file__)):
            grace = float(words[6])
            return min(grace + max(grace, KILL_SECONDS), GRACE_SECONDS_MAX) if grace else 0.0
    return 0.0


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    # No normal exit: Python resets signal handlers in it, and a late SIGTERM would replace the child's exit code.
    os._exit(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
