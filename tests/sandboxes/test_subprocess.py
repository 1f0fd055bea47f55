"""The sandbox `subprocess`: commands, files, limits, and that nothing is left of one that is closed, late or killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollouts.errors import ConfigError, SandboxError, SandboxLostError
from rollouts.sandboxes import Sandboxes, SandboxLimits, SubprocessSandboxes
from rollouts.sandboxes.base import Lease

PYTHON = sys.executable
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory and processes are measured in /proc")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder in which sandboxes are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def open_sandbox(home):
    opened = []

    def open_sandbox(**limits):
        opened.append(SubprocessSandboxes(limits=SandboxLimits(**limits)).open())
        return opened[-1]

    yield open_sandbox
    for sandbox in opened:
        sandbox.close()
    assert list(home.glob("rollouts-sandbox-*")) == []


def wait_until(holds, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_commands(open_sandbox):
    sandbox = open_sandbox()
    assert isinstance(SubprocessSandboxes(), Sandboxes)
    assert sandbox.exec("echo out; echo err >&2; exit 3")[:3] == (3, "out\n", "err\n")
    assert sandbox.exec(["echo", "a b", "$HOME"]).stdout == "a b $HOME\n"
    assert sandbox.exec(["cat"], stdin="x" * 300_000, output_kib=400).stdout == "x" * (64 << 10)  # no limit rises
    assert open_sandbox(output_kib=400).exec(["cat"], stdin="x" * 300_000).stdout == "x" * 300_000
    assert sandbox.exec("cat", stdin=b"\xff").stdout == "\ufffd"
    assert sandbox.exec("exit 0", stdin="x" * 300_000).exit_code == 0  # nothing reads it
    missing = sandbox.exec(["no-such-program"])
    assert missing.exit_code == 127 and "no-such-program" in missing.stderr
    assert sandbox.exec("kill -9 $$").exit_code == 137
    with pytest.raises(TypeError, match="a command is a text, or a list of texts"):
        sandbox.exec(["sleep", 1])
    with pytest.raises(TypeError, match=r"no limit 'memory_gb'.*did you mean memory_gib"):
        sandbox.exec("true", memory_gb=1)


def test_files(open_sandbox):
    sandbox = open_sandbox()
    result = sandbox.exec([PYTHON, "a/main.py"], files={"a/main.py": "print(open('data').read())", "data": b"42"})
    assert result.text == "42"
    sandbox.write("a/b/c.txt", "é")
    assert sandbox.exec("cat a/b/c.txt; printf 2 > made").stdout == "é"
    assert sandbox.read("made") == b"2"
    assert sandbox.read(f"{sandbox.workspace}/made") == b"2"
    with pytest.raises(FileNotFoundError, match="none"):
        sandbox.read("none")
    with pytest.raises(ValueError, match="larger than"):
        small = open_sandbox(file_mib=0.001)
        small.write("big", b"0" * 2000)
        small.read("big")


def test_one_seed_gives_one_text(open_sandbox):
    """The folder has a random name, so output shows paths in it as relative paths."""
    texts = [
        open_sandbox().exec(f"pwd; echo $HOME/x; {PYTHON} main.py", files={"main.py": "1 / 0"}).text for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith(".\nx\n") and 'File "main.py", line 1' in texts[0]


@pytest.mark.parametrize(
    "link",
    [
        "ln -s {outside}/secret x",
        "ln -s ../../../{outside}/secret x",
        "mkdir d; ln -s {outside} d/e; ln -s d/e/secret x",
    ],
)
def test_a_link_out_of_the_workspace_is_not_followed(open_sandbox, tmp_path, link):
    secret = tmp_path / "secret"
    secret.write_text("private")
    sandbox = open_sandbox()
    sandbox.exec(link.format(outside=tmp_path))
    for call in (lambda: sandbox.read("x"), lambda: sandbox.write("x", "changed")):
        with pytest.raises((ValueError, FileNotFoundError)):
            call()
    for path in ("../../secret", str(secret)):
        with pytest.raises(ValueError, match="outside of the sandbox's workspace"):
            sandbox.read(path)
    assert secret.read_text() == "private"


def test_links_inside_are_followed_and_special_files_are_not_opened(open_sandbox):
    sandbox = open_sandbox()
    sandbox.exec("mkdir d; echo 1 > d/a; ln -s d e; ln -s $PWD/e/../d/a f; ln -s g h; ln -s h g; mkfifo p")
    assert sandbox.read("e/a") == sandbox.read("f") == b"1\n"
    sandbox.write("f", "2")
    assert sandbox.exec("cat d/a").stdout == "2"
    for path in ("g", "p", "d"):
        with pytest.raises((ValueError, OSError)):
            sandbox.read(path)


# --- limits -----------------------------------------------------------------------------------------------------------


@linux
def test_a_command_that_is_late_ends_with_all_that_it_started(open_sandbox):
    sandbox = open_sandbox()
    daemons = "sleep 300 & setsid sleep 300 & (setsid sh -c 'echo $$; exec sleep 300' &) ; jobs -p; sleep 300"
    result = sandbox.exec(daemons, seconds=1.0)
    assert result.timed_out and result.exit_code == 137 and "took too long" in result.text
    assert not any(lives(pid) for pid in result.stdout.split()) and len(result.stdout.split()) >= 2


@linux
def test_what_a_command_leaves_ends_with_it(open_sandbox):
    result = open_sandbox().exec("(setsid sleep 300 & echo $!) ; sleep 300 & echo $!")
    assert result.exit_code == 0 and not result.timed_out
    assert len(result.stdout.split()) == 2 and not any(map(lives, result.stdout.split()))


@linux
def test_too_many_processes_are_stopped(open_sandbox):
    sandbox = open_sandbox(processes=30)
    bomb = (
        "i=0; while [ $i -lt 300 ]; do setsid sleep 300 & i=$((i + 1)); done; wait"  # not without an end: tests run it
    )
    result = sandbox.exec(bomb, seconds=60)
    assert result.was_killed_for_processes and "too many processes" in result.text
    assert sandbox.exec("echo alive").stdout == "alive\n"


@linux
def test_memory_of_all_processes_together(open_sandbox):
    sandbox = open_sandbox(memory_gib=0.15)
    one = f"{PYTHON} -c \"import time; x = b'x' * (60 << 20); time.sleep(60)\""
    assert sandbox.exec(f"{one} & {one} & {one} & wait", seconds=50).was_killed_for_memory
    assert not sandbox.exec(f"{PYTHON} -c \"x = b'x' * (60 << 20)\"").was_killed_for_memory
    assert sandbox.exec(
        f"{PYTHON} -c \"x = b'x' * (60 << 20)\nwhile True: pass\"", memory_gib=0.03
    ).was_killed_for_memory


def test_output_file_size_and_cpu(open_sandbox):
    sandbox = open_sandbox(output_kib=2, file_mib=1)
    flood = sandbox.exec("yes & yes >&2", seconds=0.2)
    assert flood.is_cut and len(flood.stdout) == len(flood.stderr) == 2048
    exact = sandbox.exec(f"{PYTHON} -c \"print('x' * 2047)\"")
    assert len(exact.stdout) == 2048 and not exact.is_cut
    assert sandbox.exec("head -c 3000000 /dev/zero > big; stat -c %s big").stdout == f"{1 << 20}\n"
    spin = sandbox.exec([PYTHON, "-c", "while True: pass"], cpu_seconds=1, seconds=60)
    assert spin.exit_code == 128 + signal.SIGXCPU and not spin.timed_out


def test_limits_have_a_meaning():
    with pytest.raises(ConfigError, match=r"--sandbox\.memory-gib 0: expected a number above 0"):
        SubprocessSandboxes(limits=SandboxLimits(memory_gib=0))


# --- the end ----------------------------------------------------------------------------------------------------------


@linux
def test_at_its_time_to_live_it_ends_by_itself(open_sandbox, home):
    sandbox = open_sandbox(ttl_seconds=1.0)
    (folder,) = home.glob("rollouts-sandbox-*")
    with pytest.raises(SandboxLostError, match=r"its time to live of 1 s is over; raise --sandbox\.ttl-seconds"):
        sandbox.exec("sleep 300", seconds=300)
    assert "time to live" in sandbox.lost and not folder.exists()
    with pytest.raises(SandboxLostError, match="time to live"):
        sandbox.read("x")


@linux
def test_a_command_that_kills_the_keeper_loses_the_sandbox_and_leaves_nothing(open_sandbox):
    sandbox = open_sandbox()
    sandbox.write("pids", "")
    script = "setsid sleep 300 & echo $! > ../../pid; kill -9 $PPID; sleep 300"
    with pytest.raises(SandboxLostError, match="its keeper ended"):
        sandbox.exec(script)
    assert sandbox.lost
    pid = Path(sandbox.folder).with_name("pid").read_text().strip()
    wait_until(lambda: not lives(pid))
    with pytest.raises(SandboxLostError, match="its keeper ended"):
        sandbox.exec("true")


def test_close_while_a_command_runs(open_sandbox):
    sandbox, raised, begun = open_sandbox(), [], threading.Event()

    def run():
        begun.set()
        try:
            sandbox.exec("sleep 300", seconds=300)
        except SandboxLostError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    sandbox.close()
    thread.join(30)
    assert len(raised) == 1 and "closed" in raised[0]
    assert sandbox.lost == ""  # closing is no loss
    sandbox.close()
    with pytest.raises(SandboxLostError, match="the sandbox is closed"):
        sandbox.exec("true")


def test_read_only_folders_are_removed(open_sandbox):
    open_sandbox().exec("mkdir -p a/b; touch a/b/c; chmod 0 a/b; chmod 500 a")  # the fixture looks


def test_a_sandbox_that_opens_too_late_is_closed_at_once(home):
    lease = Lease(SubprocessSandboxes())
    lease.close()
    with pytest.raises(SandboxLostError, match="closed"):
        lease.open().exec("true")
    assert list(home.iterdir()) == []


def test_a_sandbox_that_cannot_start(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(SandboxError, match="did not start in /no/such/folder"):
        SubprocessSandboxes().open()


OPENS = """\
import sys, tempfile
from rollouts.sandboxes import SubprocessSandboxes
tempfile.tempdir = sys.argv[1]
sandbox = SubprocessSandboxes().open()
print("open", flush=True)
sandbox.exec("setsid sh -c 'exec sleep 300' & (setsid sleep 300 &); sleep 300", seconds=300)
"""


def processes_of(folder):
    """The processes that work in a folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if os.readlink(each).startswith(str(folder)):
                found.append(each.parent.name)
        except OSError:
            continue
    return found


@linux
def test_many_signals_do_not_interrupt_the_end_of_a_keeper(open_sandbox, home):
    sandbox = open_sandbox()
    script = "for i in 1 2 3 4 5 6 7 8; do setsid sleep 300 & done; echo $PPID > keeper; wait"
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(sandbox.exec, script, seconds=300)
        written = Path(sandbox.workspace) / "keeper"
        wait_until(lambda: written.exists() and written.read_text().endswith("\n"))
        keeper = int(written.read_text())
        while lives(keeper):
            for number in (signal.SIGTERM, signal.SIGHUP):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(keeper, number)
        with pytest.raises(SandboxLostError, match=r"its keeper ended \(exit code 0\)"):
            running.result(30)
    assert list(home.iterdir()) == [] and processes_of(home) == []


@linux
@pytest.mark.parametrize("moment", [0, 2, *(pytest.param(each, marks=pytest.mark.nightly) for each in (1, 3, 4, 5))])
def test_nothing_is_left_of_a_run_that_was_killed(tmp_path, moment):
    """Killed while a sandbox opens (0), and while a command runs; benchmarks/sandbox_kills.py does it 1,000 times."""
    with subprocess.Popen([PYTHON, "-c", OPENS, str(tmp_path)], stdout=subprocess.PIPE) as process:
        if moment:
            assert process.stdout.readline() == b"open\n"
            time.sleep(0.02 * (moment - 1))
        else:
            wait_until(lambda: list(tmp_path.iterdir()))
        process.kill()
    wait_until(lambda: not list(tmp_path.iterdir()) and not processes_of(tmp_path))
