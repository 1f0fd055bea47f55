"""A process that keeps one sandbox: it runs one command at a time in a temporary folder, and removes the folder.

    python -I -S keeper.py FOLDER TTL          # under `rollouts.supervisor`, started by `keeping`

Requests and answers are lines of JSON on standard input and output; bytes are base64. The first answer is empty: the
folders FOLDER/workspace and FOLDER/tmp exist. When a command ends, all processes that it started are killed. The keeper
ends when its standard input closes, at SIGTERM, and after TTL seconds. It then kills the command in progress and
removes the folder.

Like the supervisor, it runs by its path and imports nothing of rollouts, so it starts in a few milliseconds.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import select
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

LOOK_SECONDS = 0.02  # the time between measurements of memory and processes
KILL_SECONDS = 30.0  # how long killing a command may take
PAUSE_SECONDS = 0.002
CHUNK = 1 << 16
MIB = 1 << 20
PRIORITY = -10  # so that a fork bomb cannot keep this process from running
NOT_FOUND = 127  # the exit code of a command that does not exist, as in a shell
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Ended(Exception):
    """The keeper has to end: its owner has closed the pipe, a signal came, or the time to live has passed."""


def communicate(
    process: subprocess.Popen[bytes],
    stdin: bytes,
    output_bytes: int,
    deadline: float,
    look: Callable[[], str] = lambda: "",
    endings: Sequence[int] = (),
) -> tuple[list[bytes], bool, str]:
    """Write `stdin` to the process and read its output, until it ends or has to be killed. Does not kill it.

    Returns the first `output_bytes` of stdout and of stderr, whether there were more, and why the process has to be
    killed: "time" at the `deadline` of time.monotonic(), or what `look` returns. "" if it has ended. Raises Ended if
    one of the descriptors `endings` becomes readable.
    """
    kept, is_cut, unwritten = [bytearray(), bytearray()], False, memoryview(stdin)
    assert process.stdin and process.stdout and process.stderr, "the process has pipes"
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for stream, number in ((process.stdout, 0), (process.stderr, 1)):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream.fileno(), selectors.EVENT_READ, number)
        if unwritten:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin.fileno(), selectors.EVENT_WRITE, "stdin")
        else:
            process.stdin.close()
        for descriptor in endings:
            selector.register(descriptor, selectors.EVENT_READ, "ending")
        if hasattr(os, "pidfd_open"):
            ended = os.pidfd_open(process.pid)
            stack.callback(os.close, ended)
            selector.register(ended, selectors.EVENT_READ, "ended")
        killed, next_look = "", 0.0
        while not killed and process.poll() is None:
            if (now := time.monotonic()) >= deadline:
                killed = "time"
            elif now >= next_look:
                killed, next_look = look(), time.monotonic() + LOOK_SECONDS
            for key, _ in selector.select(max(0.0, min(deadline, next_look) - time.monotonic())):
                if key.data == "ending":
                    raise Ended
                if key.data == "stdin":
                    unwritten = _written(process.stdin, unwritten, selector)
                elif key.data != "ended":
                    is_cut |= _read(key.fd, kept[key.data], output_bytes, selector)
        for stream, number in ((process.stdout, 0), (process.stderr, 1)):  # what is in the pipes
            while stream.fileno() in selector.get_map() and (size := len(kept[number])) <= output_bytes:
                is_cut |= _read(stream.fileno(), kept[number], output_bytes, selector)
                if len(kept[number]) == size:
                    break
    return [bytes(each) for each in kept], is_cut, killed


def _read(fd: int, kept: bytearray, output_bytes: int, selector: selectors.BaseSelector) -> bool:
    """Read what the pipe has, and keep at most `output_bytes` in all. Returns whether something was dropped."""
    with contextlib.suppress(BlockingIOError):
        chunk = os.read(fd, CHUNK)
        if not chunk:
            selector.unregister(fd)
        room = output_bytes - len(kept)
        kept += chunk[: max(0, room)]
        return len(chunk) > room
    return False


def _written(pipe: Any, unwritten: memoryview, selector: selectors.BaseSelector) -> memoryview:
    """Write a part of the input. At its end, or if the process does not read it, close the pipe."""
    try:
        unwritten = unwritten[os.write(pipe.fileno(), unwritten[:CHUNK]) :]
    except BlockingIOError:
        return unwritten
    except BrokenPipeError:
        unwritten = unwritten[:0]
    if not unwritten:
        selector.unregister(pipe.fileno())
        with contextlib.suppress(OSError):
            pipe.close()
    return unwritten


# --- processes --------------------------------------------------------------------------------------------------------


def _descendants() -> Iterator[tuple[int, str, int]]:
    """The process id, the state and the resident bytes of each descendant of this process. Nothing where there is no
    /proc.
    """
    found = [os.getpid()]
    for pid in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    found += map(int, file.read().split())
        if pid != found[0]:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                yield pid, fields[0].decode(), int(fields[21]) * _PAGE


def _reap(process: subprocess.Popen[bytes]) -> bool:
    """Collect the exit status of all children that ended. Returns whether there are others."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == process.pid:
                process.returncode = os.waitstatus_to_exitcode(found[1])
        return True
    return False


def kill_all(process: subprocess.Popen[bytes]) -> bool:
    """Kill the process and all descendants of this keeper, and wait until they have ended. Returns False if some cannot
    be killed.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the kernel kills a whole group at once, also one that forks
        for pid, _, _ in _descendants():  # killed as they are found, because a fork bomb may grow faster than a list
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not _reap(process):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_SECONDS)


def limited(limits: Mapping[str, Any], priority: int) -> None:
    """Set the limits of a command, in its own process."""
    for kind, most, more in (
        (resource.RLIMIT_CPU, max(1, round(limits["cpu_seconds"])), 1),  # SIGXCPU, and SIGKILL a second later
        (resource.RLIMIT_FSIZE, int(limits["file_mib"] * MIB), 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        if hard == resource.RLIM_INFINITY or hard > most + more:
            resource.setrlimit(kind, (most, most + more))
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpriority(os.PRIO_PROCESS, 0, priority)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine is out of memory, the kernel kills commands first


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# --- the keeper -------------------------------------------------------------------------------------------------------


def run_command(request: Mapping[str, Any], priority: int, woken: int) -> dict[str, Any]:
    """Run the command of a request at this priority, and kill everything that it leaves. Returns the answer. Raises
    Ended if a signal has made `woken` readable, or if the owner has closed the pipe.
    """
    limits: Mapping[str, Any] = request["limits"]

    def look() -> str:
        _reap(process)
        count, resident = -request["own_processes"], 0
        for _, state, size in _descendants():
            count, resident = count + (state not in "ZX"), resident + size
            if count > limits["processes"]:  # at once, because the number may grow quickly
                return "processes"
        return "memory" if resident > limits["memory_gib"] * 1024 * MIB else ""

    try:
        process = subprocess.Popen(
            request["argv"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=request["cwd"],
            env=request["variables"],
            start_new_session=True,
            preexec_fn=lambda: limited(limits, priority),
        )
    except (OSError, ValueError) as error:  # ValueError: an argument with a null character or half a character
        words = f"{request['argv'][0]}: {getattr(error, 'strerror', error)}".encode(errors="replace")
        return {"exit_code": NOT_FOUND, "output": _texts([b"", words]), "is_cut": False, "killed": ""}
    deadline = time.monotonic() + request["seconds"]
    stdin = base64.b64decode(request["stdin"])
    try:
        output, is_cut, killed = communicate(
            process, stdin, int(limits["output_kib"] * 1024), deadline, look, (0, woken)
        )
    finally:
        is_clean = kill_all(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
    if not is_clean:
        raise Ended
    code = process.returncode
    code = code if code >= 0 else 128 - code
    return {"exit_code": code, "output": _texts(output), "is_cut": is_cut, "killed": killed}


def _texts(output: Sequence[bytes]) -> list[str]:
    return [base64.b64encode(each).decode() for each in output]


def _receive(woken: int) -> Any:
    """The next request. Raises Ended if there is none: see `run_command`."""
    line = bytearray()
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([0, woken], [], [])
        chunk = b"" if woken in ready else os.read(0, CHUNK)
        if not chunk:
            raise Ended
        line += chunk
    return json.loads(line)


def _send(answer: Mapping[str, Any], woken: int) -> None:
    """Write an answer. Raises Ended if a signal has made `woken` readable, and BrokenPipeError."""
    unsent = memoryview(json.dumps(answer).encode() + b"\n")
    while unsent:
        ready, _, _ = select.select([woken], [1], [])
        if ready:
            raise Ended
        unsent = unsent[os.write(1, unsent[:CHUNK]) :]


def main(folder: str, ttl: float) -> None:
    """Keep one sandbox until it has to end.

    A signal raises nothing. It makes a pipe readable, and only the places that wait for something look at it. So a
    signal cannot interrupt the end of a command or the removal of the folder, however many there are.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(1, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # Python writes the signal's number to `wake`
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError):  # only root may; others have limits of the kernel, which root does not have
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    try:
        signal.setitimer(signal.ITIMER_REAL, ttl)
        for path in (folder, f"{folder}/workspace", f"{folder}/tmp"):
            os.mkdir(path, 0o700)
        answer: dict[str, Any] = {}
        while True:
            _send(answer, woken)
            answer = run_command(_receive(woken), priority, woken)
    except (Ended, BrokenPipeError):
        pass
    finally:
        remove(folder)
        os._exit(0)  # no normal exit: Python resets signal handlers in it


def remove(folder: str) -> None:
    """Remove a sandbox's folder, and do nothing if there is none."""
    shutil.rmtree(folder, onerror=_unlock)


def _unlock(function: Callable[..., Any], path: str, _: Any) -> None:
    """Remove what is in a folder that a command has made read-only. The mode of files is not changed: a file may be a
    hard link to one outside.
    """
    with contextlib.suppress(OSError):
        for each in (os.path.dirname(path), path):
            if os.path.isdir(each) and not os.path.islink(each):
                os.chmod(each, 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
