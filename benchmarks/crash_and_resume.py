"""Does a run survive a crash of the machine? Shut down its file system without a last flush, mount it again, and
resume.

    sudo -E $(which python) benchmarks/crash_and_resume.py                # 10 crashes
    sudo -E $(which python) benchmarks/crash_and_resume.py --crashes 2 --kinds plain,lora --out crashes.json
    sudo -E $(which python) benchmarks/crash_and_resume.py --how shutdown

The result is compared bit by bit with an undisturbed run. Needs Linux, root, a free loop device and e2fsprogs.

The runs are those of kill_and_resume.py, in an ext4 file system in a file of 512 MiB. The mount options
(`commit=600,noauto_da_alloc`) commit the journal only on a sync, and a rename flushes nothing, so everything that is
not synced is lost. The crash comes at a random moment, or, in one of three cases, while a checkpoint is being written.
`--how abort` remounts the file system with `abort`; `--how shutdown` shuts ext4 down without writing its journal. Then
the run is killed, and the file system is unmounted, repaired by its journal, checked by fsck and mounted again. A crash
takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kill_and_resume import KINDS, begin, compare, finish, go_on, result

SIZE = 512 << 20
OPTIONS = "loop,commit=600,noauto_da_alloc"
SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
WITHOUT_JOURNAL = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH


def main(argv: Sequence[str] | None = None) -> int:
    """Crash, repair, resume and compare. Returns 1 if a result differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crashes", type=int, default=10, help="in all")
    parser.add_argument("--kinds", default="plain,lora,sft,ppo", help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--how", choices=("abort", "shutdown"), default="abort", help="how the file system goes down")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", default="", help="a file for what was found")
    arguments = parser.parse_args(argv)
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        parser.error("it mounts a file system, so it needs root: type sudo -E $(which python) and the same again")
    rng = random.Random(arguments.seed)
    crashes: list[dict[str, Any]] = []
    unbroken: dict[str, tuple[float, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, kind in enumerate(itertools.cycle(arguments.kinds.split(","))):
            if len(crashes) == arguments.crashes:
                break
            if kind not in unbroken:
                whole = Path(scratch) / f"unbroken-{kind}"
                seconds = finish(begin(whole, kind), whole)
                unbroken[kind] = seconds, result(whole, kind)
            seconds, expected = unbroken[kind]
            place = Path(scratch) / f"disk-{number}"
            crash = _one_crash(place, kind, arguments.how, rng.random() * seconds, rng.random() < 0.33, expected)
            if crash is None:
                continue  # the run finished before the crash
            crashes.append(crash)
            print(f"{len(crashes)}: {kind}, {crash['left']}: {'; '.join(crash['faults']) or 'the same'}", flush=True)
    good = sum(not crash["faults"] for crash in crashes)
    print(f"{good} of {len(crashes)} crashes were survived")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(crashes, indent=1) + "\n")
    return 0 if good == len(crashes) else 1


def _one_crash(
    place: Path, kind: str, how: str, moment: float, while_saving: bool, expected: Any
) -> dict[str, Any] | None:
    """Run on a new file system, which crashes `moment` seconds after the run folder exists, or at the next save."""
    image = place.with_suffix(".ext4")
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(SIZE)
    _call("mkfs.ext4", "-q", "-F", str(image))
    folder = place / "runs" / "one"
    with _mounted(image, place):
        process = subprocess.Popen(
            [sys.executable, "-m", *begin(folder, kind)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            if not _wait(process, folder, moment, while_saving):
                return None
            _crash(place, how)
        finally:
            process.kill()
            process.wait()
    _call("fsck.ext4", "-p", str(image), accepted=(0, 1))
    _call("fsck.ext4", "-f", "-n", str(image))
    with _mounted(image, place):
        left = _in_words(folder)
        faults = _resumed(folder, kind, expected)
    image.unlink()
    return {"kind": kind, "left": left, "faults": faults}


def _wait(process: subprocess.Popen[bytes], folder: Path, moment: float, while_saving: bool) -> bool:
    """Wait until the time of the crash. False if the run ends before."""
    while process.poll() is None and not (folder / ".lock").exists():
        time.sleep(0.002)
    end = time.monotonic() + moment
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    while while_saving and process.poll() is None and not list((folder / "checkpoints").glob(".*writing*")):
        time.sleep(0.002)
    return process.poll() is None


def _crash(place: Path, how: str) -> None:
    if how == "abort":
        _call(
            "mount", "-o", "remount,abort", str(place), accepted=(0, 32)
        )  # the file system is down even if mount fails
        return
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", WITHOUT_JOURNAL))
    finally:
        os.close(descriptor)


def _resumed(folder: Path, kind: str, expected: Any) -> list[str]:
    """Resume the run, or start it again if the crash lost its start. Returns the differences."""
    empty = [path.name for path in folder.rglob("*.json*") if not path.stat().st_size] if folder.exists() else []
    last = max((int(path.name[5:]) for path in folder.glob("checkpoints/step_*")), default=0)
    lost = [name for name in empty if last and (not name.startswith("step_") or int(name[5:11]) < last)]
    try:
        finish(go_on(folder, kind), folder)
    except RuntimeError as error:
        return [str(error)]
    return [f"{name} was empty" for name in lost] + compare(folder, kind, expected)


def _in_words(folder: Path) -> str:
    saved = sorted(path.parent.name for path in folder.glob("checkpoints/step_*/manifest.json"))
    return f"the last checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"


@contextlib.contextmanager
def _mounted(image: Path, place: Path) -> Iterator[None]:
    _call("mount", "-o", OPTIONS, str(image), str(place))
    try:
        yield
    finally:
        _call("umount", str(place))


def _call(*command: str, accepted: Sequence[int] = (0,)) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in accepted:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
