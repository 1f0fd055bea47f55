"""ServerProcess: it starts, is ready, ends with all of its children, and errors show what its log says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import trio
from rollouts_servers import process as launching
from rollouts_servers.process import ServerCommand, ServerProcess, free_port, meaningful_lines

from rollouts.child_environment import child_environment
from rollouts.errors import ConfigError, InferenceError

# A server with a child that has left its group; the ids of both are in the file `ids`, and so are its arguments.
SERVER = """
import http.server, os, signal, subprocess, sys
port, ids, stubborn = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "stubborn"
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(ids, "w") as file:
    print(os.getpid(), child.pid, os.environ.get("CUDA_VISIBLE_DEVICES"), file=file)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def server(tmp_path: Path, how: str = "meek", source: str = SERVER, **settings) -> ServerProcess:
    def command(port: int) -> ServerCommand:
        argv = [sys.executable, "-S", "-c", source, str(port), str(tmp_path / "ids"), how, "--api-key", "hush"]
        return ServerCommand(argv, {"SERVER_SETTING": "1", "SERVER_API_KEY": "hush"}, "/ready")

    settings = {"start_seconds": 20.0, "grace_seconds": 2.0} | settings
    return ServerProcess(command, name="fake-0", folder=tmp_path, **settings)


def failing(source: str):
    return "import sys\n" + textwrap.dedent(source)


async def smoke(url: str) -> None:
    await trio.lowlevel.checkpoint()


def ids_of(tmp_path: Path) -> list[int]:
    return [int(word) for word in (tmp_path / "ids").read_text().split()[:2]]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(lives, pids))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_it_starts_and_ends_and_leaves_nothing(tmp_path):
    async def main():
        seen = []

        async def smoke(url):
            seen.append(url)
            if len(seen) < 3:
                raise InferenceError("still compiling")

        process = server(tmp_path, gpus="2,3")
        await process.end()  # harmless
        await process.start(smoke)
        assert not process.has_ended and len(seen) == 3 and set(seen) == {process.url}
        pids = ids_of(tmp_path)
        assert (tmp_path / "ids").read_text().split()[2] == "2,3" and all(map(lives, pids))
        await process.end()
        assert process.has_ended and gone(pids)
        with socket.create_server(("127.0.0.1", int(process.url.rpartition(":")[2]))):
            pass
        await process.start(smoke)  # again
        again = ids_of(tmp_path)
        assert again != pids and not process.has_ended
        await process.end()
        assert gone(again)

    trio.run(main)
    before = open_files()
    trio.run(main)
    assert open_files() == before
    text = (tmp_path / "servers" / "fake-0.log").read_text()
    assert "SERVER_SETTING=1" in text and "hush" not in text


def test_one_that_does_not_listen_to_sigterm_is_killed(tmp_path):
    async def main():
        process = server(tmp_path, "stubborn", grace_seconds=0.3)
        await process.start(smoke)
        began = time.monotonic()
        with trio.CancelScope() as scope:
            scope.cancel()
            await process.end()  # shielded
        assert process.has_ended and 0.3 <= time.monotonic() - began < 30
        assert gone(ids_of(tmp_path))

    trio.run(main)


def test_one_that_dies_says_how_and_takes_its_children_along(tmp_path):
    async def main():
        process = server(tmp_path)
        await process.start(smoke)
        pids = ids_of(tmp_path)
        os.kill(pids[0], signal.SIGKILL)
        with trio.fail_after(5):
            assert await process.wait() == "exit code 137 = 128 + 9, probably SIGKILL; was it out of memory?"
        assert process.has_ended and gone(pids)
        await process.end()

    trio.run(main)


@pytest.mark.parametrize("supervisor", ["lives", pytest.param("is killed", marks=pytest.mark.nightly)])
def test_killing_us_leaves_no_server(tmp_path, supervisor):
    """By SIGKILL, so that nothing of ours can run; once more with the supervisor killed first."""
    source = f"""
        import os, signal, sys, trio
        sys.path.insert(0, {str(Path(launching.__file__).parents[2])!r})
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_launching import server, smoke
        async def main():
            process = server(Path({str(tmp_path)!r}))
            await process.start(smoke)
            if {supervisor!r} == "is killed":
                os.kill(process._process.pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        trio.run(main)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=30)
    assert done.returncode == -signal.SIGKILL, done.stderr
    server_pid, child = ids_of(tmp_path)
    assert gone([server_pid])
    if supervisor == "lives":
        assert gone([child])
    elif lives(child):  # it has left the group, and no process is left that could know it
        os.kill(child, signal.SIGKILL)


def test_cancelling_the_start_leaves_nothing(tmp_path):
    async def main():
        process = server(tmp_path)

        async def endless(url):
            scope.cancel()
            await trio.sleep_forever()

        with trio.CancelScope() as scope:
            await process.start(endless)
        assert scope.cancelled_caught and process.has_ended and gone(ids_of(tmp_path))

    trio.run(main)


def error_of(tmp_path: Path, source: str, smoke=smoke, **settings) -> str:
    async def main():
        process = server(tmp_path, source=failing(source), **settings)
        with pytest.raises(ConfigError) as caught:
            await process.start(smoke)
        assert process.has_ended
        return str(caught.value)

    return trio.run(main)


def test_the_error_shows_what_the_log_ends_with(tmp_path):
    words = error_of(
        tmp_path,
        """
        print("INFO 11-21 10:00:00 [core.py:1] loading")
        print("(EngineCore pid=12) ERROR 11-21 10:00:00 [core.py:93] Traceback (most recent call last):")
        print("(EngineCore pid=12) ERROR 11-21 10:00:00 [core.py:93]     raise ValueError('no')")
        print("(EngineCore pid=12) ERROR 11-21 10:00:00 [core.py:93] ValueError: the rank 64 is above 8")
        print("bye")
        sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")
        """,
    )
    log = tmp_path / "servers" / "fake-0.log"
    assert "before it was ready (exit code 1)" in words and f"the whole log is {log}" in words
    assert "\n  ValueError: the rank 64 is above 8\n" in words and "root cause" not in words and "bye" not in words
    again = error_of(tmp_path, "print('something else'); sys.exit(3)")
    assert "something else" in again and "rank 64" not in again  # what an earlier start has left is not shown


def test_a_silent_end_and_a_slow_start_are_named(tmp_path):
    assert "is empty" in error_of(tmp_path, "sys.exit(3)")
    words = error_of(tmp_path, "import time\nprint('still loading', flush=True)\ntime.sleep(60)", start_seconds=0.6)
    assert (
        "was not ready after 0.6 seconds" in words and "--inference.start-seconds" in words and "still loading" in words
    )


def test_what_never_works_is_raised_as_it_is(tmp_path):
    async def refusing(url):
        raise ConfigError("start it with --enable-lora")

    async def main():
        process = server(tmp_path)
        with pytest.raises(ConfigError, match=r"^start it with --enable-lora$"):
            await process.start(refusing)
        assert gone(ids_of(tmp_path))

    trio.run(main)


def test_one_that_ends_during_its_first_generation_is_named_at_once(tmp_path):
    async def deadly(url):
        os.kill(ids_of(tmp_path)[0], signal.SIGKILL)
        await trio.sleep_forever()

    async def main():
        process = server(tmp_path)
        with trio.fail_after(10), pytest.raises(ConfigError, match="SIGKILL"):
            await process.start(deadly)
        assert gone(ids_of(tmp_path))

    trio.run(main)


def test_a_port_that_was_taken_is_chosen_anew(tmp_path, monkeypatch):
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = other.getsockname()[1]
            ports = [taken, free_port()]
            monkeypatch.setattr(launching, "free_port", lambda: ports.pop(0))
            process = server(tmp_path)
            await process.start(smoke)
            assert ports == [] and not process.url.endswith(f":{taken}")
            await process.end()
            monkeypatch.setattr(launching, "PORTS_MAX", 1)
            ports.append(taken)
            with pytest.raises(ConfigError, match="Address already in use"):
                await process.start(smoke)

    trio.run(main)


def test_an_interpreter_that_is_not_there(tmp_path):
    process = ServerProcess(lambda port: ServerCommand(["no-such-python"], {}), name="x", folder=tmp_path)
    with pytest.raises(ConfigError, match="no-such-python"):
        trio.run(process.start, smoke)


def test_without_errors_the_last_lines_are_shown():
    lines = [f"line {number}" for number in range(20)]
    assert meaningful_lines("\n".join(lines)) == lines[-launching.LINES_MAX :]
    assert meaningful_lines("\x1b[31mOSError: no space\x1b[0m\nx\nOSError: no space\n") == ["OSError: no space"]
    assert meaningful_lines("api_server.py: error: unrecognized arguments: --lora\n")[0].endswith("--lora")


def test_the_tests_hide_the_gpus_of_this_machine(monkeypatch):
    """conftest.py does, also from the processes that tests start."""
    assert child_environment()["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setattr(launching, "Path", lambda place: Path(os.devnull))  # the device of a driver
    assert not launching.has_gpu()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert launching.has_gpu()
