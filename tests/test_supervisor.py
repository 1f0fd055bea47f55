"""How the supervisor of a child ends: as the child did, and after all of it."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollouts import supervisor

FEIGNS_DEATH = """\
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("begun", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.fixture
def start():
    lifeline, begun = os.pipe(), []

    def start(code: str, grace: float) -> subprocess.Popen[bytes]:
        command = supervisor.supervised([sys.executable, "-S", "-c", code], lifeline[0], grace_seconds=grace)
        begun.append(subprocess.Popen(command, pass_fds=lifeline[:1], stdout=subprocess.PIPE, start_new_session=True))
        return begun[-1]

    yield start
    for end in lifeline:
        os.close(end)
    for process in begun:
        process.communicate()


@pytest.mark.parametrize("grace", [0.0, 1.0])
def test_signals_that_come_late_hide_no_exit_code(start, grace):
    process = start("import os; os._exit(3)", grace)
    assert process.stdout.read() == b""  # the child ends now
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 3


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
def test_a_process_whose_first_thread_has_ended_is_killed_and_waited_for(start):
    process = start(FEIGNS_DEATH, 0.0)
    assert process.stdout.readline() == b"begun\n"
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGKILL
    assert not Path(f"/proc/{child}").exists()


def test_an_owner_may_have_many_files_open():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    lifeline = os.pipe()
    try:
        high = fcntl.fcntl(lifeline[0], fcntl.F_DUPFD, 1500)
        command = supervisor.supervised([sys.executable, "-S", "-c", "import time; time.sleep(0.2)"], high)
        process = subprocess.Popen(command, pass_fds=[high], start_new_session=True)
        os.close(high)
        assert process.wait(20) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for end in lifeline:
            os.close(end)
