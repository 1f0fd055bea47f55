"""Kill a process that uses a sandbox, at random moments, and look for what is left: processes, or files.

    python benchmarks/sandbox_kills.py --kills 1000 --sandbox subprocess

Each time, a process opens a sandbox and runs commands in it that start processes in other sessions and in the
background. It is killed with SIGKILL between 0 and `--most-seconds` later: while the sandbox opens, while a command
runs, or while the sandbox closes. Then no process may have its environment variables, and its folder must be empty,
within `--wait-seconds`. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rollouts.plugins.manager import PluginManager

MARK = "ROLLOUTS_SANDBOX_KILLS"
COMMAND = """
setsid sh -c 'while true; do sleep 0.1; done' &
(setsid sh -c 'sleep 300 & sleep 300' &)
sh -c 'sh -c "sleep 300" & sleep 300' &
echo x > file; mkdir -p a/b; sleep 0.2
"""


def use(sandboxes: object, folder: str) -> None:
    """Use sandboxes until the kill."""
    tempfile.tempdir = folder
    while True:
        sandbox = sandboxes.open()  # type: ignore[attr-defined]
        for _ in range(3):
            sandbox.exec(COMMAND, files={"b": "2"})
        sandbox.close()


def left(mark: str, folder: Path) -> list[str]:
    """The processes with this mark in their environment, and the files in the folder."""
    found = [str(path) for path in folder.iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def kill_one(sandboxes: object, number: int, moment: float, wait_seconds: float) -> float:
    """Start a process, kill it after `moment` seconds, and wait until nothing is left. Returns the seconds of that
    wait. Raises AssertionError if something stays.
    """
    mark = f"{os.getpid()}-{number}"
    with tempfile.TemporaryDirectory(prefix="sandbox-kills-") as folder:
        os.environ[MARK] = mark
        pid = os.fork()
        if pid == 0:
            try:
                use(sandboxes, folder)
            finally:
                os._exit(1)
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "the process failed before it was killed"
        killed, del_mark = time.monotonic(), os.environ.pop(MARK)
        while found := left(del_mark, Path(folder)):
            assert time.monotonic() - killed < wait_seconds, f"kill {number}, after {moment:.3f} s, left: {found}"
            time.sleep(0.02)
        return time.monotonic() - killed


def main() -> int:
    """Kill, and print how long the end took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--sandbox", default="subprocess")
    parser.add_argument("--most-seconds", type=float, default=0.6)
    parser.add_argument("--wait-seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    manager, rng = PluginManager(), random.Random(given.seed)
    sandboxes = manager.load(manager.find("sandboxes", given.sandbox))()
    sandboxes.check()
    waits = []
    for number in range(given.kills):
        waits.append(kill_one(sandboxes, number, rng.uniform(0.0, given.most_seconds), given.wait_seconds))
        if (number + 1) % 100 == 0:
            print(f"{number + 1} kills, nothing left", flush=True)
    print(
        f"{given.kills} kills: nothing is left after {statistics.median(waits):.2f} s (median), at most "
        f"{max(waits):.2f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
