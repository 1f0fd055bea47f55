"""Real servers for these tests: each is installed once, into `$ROLLOUTS_ENGINES/<name>`, and started on a free port.

make test-engines                     ROLLOUTS_ENGINES is ~/.cache/rollouts/engines unless it is set
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("vllm", "sglang")
START_SECONDS, END_SECONDS = 300.0, 20.0


@pytest.fixture(scope="module", autouse=True)
def installed(request: pytest.FixtureRequest) -> str:
    """The interpreter of the environment that the module's engine is in; it is made where there is none."""
    name = next(name for name in NAMES if name in request.module.__name__)
    folder = Path(os.environ.setdefault("ROLLOUTS_ENGINES", str(Path.home() / ".cache" / "rollouts" / "engines")))
    python = folder / name / "bin" / "python"
    if not python.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).with_name(f"install_{name}.sh")
        environment = {"PYTHON": sys.executable, **os.environ}
        done = subprocess.run(["bash", str(script), str(folder / name)], env=environment, check=False)
        if done.returncode:
            shutil.rmtree(folder / name, ignore_errors=True)  # half of one would be taken for a whole one
            pytest.fail(f"{script.name} failed with {done.returncode}")
    return str(python)


@pytest.fixture(scope="module")
def serve(installed: str) -> Iterator[Callable[..., str]]:
    """Start a server with a command as `serve_vllm` makes it, `serve(make, log)`, and give its URL; it ends with the
    module. `make(python, port)` gives the command.
    """
    with contextlib.ExitStack() as stack:

        def start(make: Callable[[str, int], Any], log: Path) -> str:
            return stack.enter_context(_served(make(installed, port := _free_port()), port, log))

        yield start


@contextlib.contextmanager
def _served(command: Any, port: int, log: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(url + command.ready_path):
            ended = process.poll()
            assert ended is None and time.monotonic() < until, f"{ended=}: {log.read_text()[-3000:]}"
            time.sleep(0.25)
        yield url
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
