"""Processes that start with torch and transformers loaded: forks of one server, which imports them once for all tests.

The imports take five seconds of CPU, more than most tests spend in a process. A fork is a process like any other: it
has its own memory, signals, threads and exit code, and it runs `python -m MODULE`, `python -c CODE` or a script. It
does not test the start of the interpreter; some tests start a new one for that reason. All forks share the server's
hash seed, and the environment variables that libraries read when they are imported.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import reduction
from types import ModuleType
from typing import IO, Any

__all__ = ["popen", "run", "servers"]

LOADED = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "rollouts.cli",
    "rollouts.runs",
    "rollouts.runs.jobs.train",
    "rollouts.inference.embedded.hf",
    "rollouts_fsdp.backend",
    "rollouts_fsdp.ranks",
    "rollouts.training.loops",
]
KNOWN = {"cwd", "env", "start_new_session", "stderr", "stdin", "stdout", "text"}


def popen(command: Sequence[str], **settings: Any) -> Any:
    """subprocess.Popen of this Python with `-m MODULE`, `-c CODE` or a script. Elsewhere than on Linux, and with
    settings that a fork does not know, it starts an interpreter.
    """
    if sys.platform != "linux" or command[0] != sys.executable or not settings.keys() <= KNOWN:
        return subprocess.Popen(command, **settings)
    return _Fork(list(command[1:]), **settings)


def run(command: Sequence[str], *, timeout: float, **settings: Any) -> subprocess.CompletedProcess[str]:
    """subprocess.run of such a command, with its output as text."""
    process = popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)
    said, error = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, process.returncode, said, error)


def servers() -> list[int]:
    """The process of the server, if it runs."""
    server = sys.modules.get("multiprocessing.forkserver")
    pid = server and server._forkserver._forkserver_pid
    return [pid] if pid else []


class _Fork:
    """What tests and rollouts use of a subprocess.Popen."""

    def __init__(
        self,
        words: list[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: dict[str, str] | None = None,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        start_new_session: bool = False,
        text: bool = False,
    ) -> None:
        from multiprocessing.popen_forkserver import Popen  # not on Windows

        self._ours: list[int] = []
        self.stdin = None
        if stdin == subprocess.PIPE:
            reading, writing = os.pipe()
            self.stdin = open(writing, "w" if text else "wb")
            self._ours.append(reading)
        elif stdin == subprocess.DEVNULL:
            self._ours.append(os.open(os.devnull, os.O_RDONLY))
        given = [_Descriptor(self._ours[0] if self._ours else stdin if isinstance(stdin, int) else stdin.fileno())]
        self.stdout = self._stream(stdout, 1, given, text)
        self.stderr = self._stream(given[1].number if stderr == subprocess.STDOUT else stderr, 2, given, text)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LOADED)
        environment = dict(os.environ if env is None else env)
        folder = os.fspath(cwd or os.getcwd())
        process = context.Process(target=_serve, args=(words, environment, folder, given, start_new_session))
        self._popen = Popen(process)
        self._lock = threading.Lock()  # its status is read once
        self.pid = self._popen.pid
        for number in self._ours:
            os.close(number)

    def _stream(self, wanted: int | None, own: int, given: list[_Descriptor], text: bool) -> Any:
        if wanted != subprocess.PIPE:
            is_null = wanted == subprocess.DEVNULL
            number = os.open(os.devnull, os.O_WRONLY) if is_null else own if wanted is None else wanted
            self._ours += [number] if is_null else []
            given.append(_Descriptor(number))
            return None
        reading, writing = os.pipe()
        self._ours.append(writing)
        given.append(_Descriptor(writing))
        return open(reading, "r" if text else "rb")

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._lock:
            return self._popen.poll()

    def wait(self, timeout: float | None = None) -> int:
        from multiprocessing.connection import wait

        if self.poll() is None and not wait([self._popen.sentinel], timeout):
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        code = self.poll()
        assert code is not None, "it has ended"
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(15)

    def kill(self) -> None:
        self.send_signal(9)

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        with ThreadPoolExecutor(2) as readers:
            found = [stream and readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        said, error = (each and each.result() for each in found)
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        return said, error


class _Descriptor:
    """A file descriptor on its way to a fork, which gets the number of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _detach, (reduction.DupFd(self.number),)


def _detach(duplicate: Any) -> int:
    return duplicate.detach()


def _serve(words: list[str], environment: dict[str, str], folder: str, given: list[int], apart: bool) -> None:
    """In the fork: what `python -m MODULE …`, `python -c CODE …` or `python SCRIPT …` does. If it is `apart`, in a
    session of its own, whose terminal is the standard input if that is one.
    """
    gc.freeze()  # or each collection visits what the server imported
    if apart:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for own, number in enumerate(given):
        os.dup2(number, own)
        os.close(number)
    if apart and os.isatty(0):
        import fcntl  # neither of them is on Windows
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    way, name = ("", words[0]) if words[0] not in ("-m", "-c") else words[:2]
    sys.argv = words[1:] if way == "-m" else ["-c", *words[2:]] if way == "-c" else words
    first = {"-m": folder, "-c": ""}.get(way, os.path.dirname(name))
    sys.path[:0] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if way == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif way == "-c":
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(name, "<string>", "exec"), vars(main))
    else:
        runpy.run_path(name, run_name="__main__")
