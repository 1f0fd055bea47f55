"""The process above a worker: it owns everything that a tool started, and ends all of it.

A worker runs an author's code, so it may die at any moment, or be busy for ever. The supervisor runs nothing of an
author's. On Linux it adopts every orphan among its descendants (a child subreaper), also a daemon that has a session of
its own; elsewhere it knows the worker's process group only, and a process that leaves the group is missed. It kills
them when the worker ends, when SIGTERM comes, and when its owner is gone. Left out: what the worker does (`worker`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator

__all__ = ["supervise"]

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
KILL_SECONDS = 4.0  # to end processes that may still start others
PAUSE_SECONDS = 0.005


def supervise(lifeline: int) -> None:
    """Fork. The child is the worker: there this returns, in a session of its own. The parent stays here until all of
    its descendants are gone, and ends as the worker did.

    `lifeline` is a pipe that nobody writes to: it closes when its owner ends, however that ends.
    """
    adopts = _prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # its number is written to `wake`
    signal.set_wakeup_fd(wake)
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for end in (woken, wake, lifeline):
            os.close(end)
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    status = _watch(worker, woken, lifeline)
    killed = _end_all(worker, adopts)
    _end_like(killed if status is None else status)


def _watch(worker: int, woken: int, lifeline: int) -> int | None:
    """Wait for the worker's end; its status, or None where it has to be ended."""
    while True:
        ready, _, _ = select.select([lifeline, woken], [], [])
        if lifeline in ready or signal.SIGTERM in os.read(woken, 512):
            return None
        for pid, status in _ended():
            if pid == worker:
                return status


def _ended() -> Iterator[tuple[int, int]]:
    """The children that have ended, each with its status."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _end_all(worker: int, adopts: bool) -> int | None:
    """Kill every child until there is none. The children of one that is killed become ours where we adopt them. Returns
    the worker's status, which is its own where it had ended by itself; None where it was known before.
    """
    found = None
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not adopts:
                os.killpg(worker, signal.SIGKILL)
        for child in _children() if adopts else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if child == worker:
            found = status
        elif child == 0:
            time.sleep(PAUSE_SECONDS)
    return found


def _children() -> list[int]:
    """The processes whose parent is this one, as /proc has them."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def _end_like(status: int | None) -> None:
    """End as the worker did, so that whoever waits for this process reads the worker's end."""
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def _prctl(option: int, value: int) -> bool:
    """Whether the kernel did it; only Linux has this."""
    return sys.platform == "linux" and ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0
