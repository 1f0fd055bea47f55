"""The processes that `rollouts check` starts, as forks of servers that have imported it: one server for each hash seed.

A fork saves the half second in which a new interpreter imports the check, and differs from one in nothing that the
check is about: it has its own memory, its server's hash seed, a session of its own and the working directory of the
moment. What watches the import itself gets a new interpreter. The servers have imported no torch, which `run` is for.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

__all__ = ["popen", "run", "servers"]

SERVE = """
import gc, json, os, sys
import trio
import rollouts.check  # opens the door
import rollouts_check.environments.child
import rollouts_check.environments.processes
import rollouts_check.environments.subject
gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["variables"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(request["output"], os.O_WRONLY), 1)
        os.dup2(os.open(request["errors"], os.O_WRONLY), 2)
        sys.argv = ["-c", *request["words"]]
        code = 1
        try:
            exec(request["code"], {"__name__": "__main__"})
            code = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

_servers: dict[str, subprocess.Popen[bytes]] = {}


def popen(command: list[str], *, env: dict[str, str], stdout: int, stderr: Any, start_new_session: bool) -> Any:
    """As the check uses subprocess.Popen."""
    if sys.platform != "linux" or command[:2] != [sys.executable, "-c"] or '"forbidden":' in command[3]:
        return subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, start_new_session=start_new_session)
    server = _server(env.get("PYTHONHASHSEED", "random"))
    return _Fork(server, command[2], command[3:], env, os.getcwd(), errors=f"/proc/{os.getpid()}/fd/{stderr.fileno()}")


def run(command: Sequence[str], *, cwd: str | os.PathLike[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """subprocess.run of `python -c CODE …` with its output as text, in a process that has not imported torch."""
    if sys.platform != "linux":
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    assert list(command[:2]) == [sys.executable, "-c"], command
    with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
        files = {"output": output.name, "errors": errors.name}
        fork = _Fork(_server("random"), command[2], list(command[3:]), dict(os.environ), os.fspath(cwd), **files)
        code = fork.wait(timeout)
        return subprocess.CompletedProcess(command, code, output.read().decode(), errors.read().decode())


def _server(seed: str) -> subprocess.Popen[bytes]:
    if seed not in _servers:
        variables = {**os.environ, "PYTHONHASHSEED": seed}
        _servers[seed] = subprocess.Popen(
            [sys.executable, "-c", SERVE], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        atexit.register(_end, _servers[seed])
    return _servers[seed]


def servers() -> list[int]:
    """The processes of the servers."""
    return [server.pid for server in _servers.values()]


def _end(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.communicate()


class _Fork:
    def __init__(
        self,
        server: subprocess.Popen[bytes],
        code: str,
        words: list[str],
        env: dict[str, str],
        folder: str,
        output: str = os.devnull,
        errors: str = os.devnull,
    ) -> None:
        assert server.stdin is not None and server.stdout is not None, "it was started with pipes"
        request = {"code": code, "words": words, "variables": env, "folder": folder, "output": output, "errors": errors}
        server.stdin.write(json.dumps(request).encode() + b"\n")
        self._answers = server.stdout
        self.pid = int(self._line())
        self._code: int | None = None

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            line += self._answers.read(1) or b"\n"
        return line

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            self._code = int(self._line())
        return self._code
