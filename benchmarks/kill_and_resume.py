"""Does every run survive kill -9? Runs are killed at random moments and resumed; the result is compared to the bit.

    python benchmarks/kill_and_resume.py                      # 30 kills of a single process, 20 of two ranks
    python benchmarks/kill_and_resume.py --single 5 --ranks 0
    python benchmarks/kill_and_resume.py --out kills.json

A run is the calculator with the embedded model: 10 steps of 2 prompts x 4 rollouts, a checkpoint after each. Of the
kills one in four waits for a checkpoint that is being written, the others come at a random time of a run. A run may be
killed again while it is resumed. Compared with a run that nobody killed: every metric of every step that no clock
decides, every trajectory (so no prompt is lost or trained twice), and the last checkpoint's weights and moments.
Nothing may be left of what was half written, and no rank may outlive rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = 10
RUN = [
    "run", "--env", "calculator", "--loss", "grpo", "--steps", str(STEPS), "--prompts-per-step", "2",
    "--samples-per-prompt", "4", "--max-tokens", "32", "--eval-tasks", "8", "--checkpoint-every", "1",
]  # fmt: skip
RANKS = ["--training", "fsdp", "--training.processes", "2"]
TIMED = ("time/", "perf/", "sync/seconds", "rollout/latency")
SECONDS_MAX = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, resume, compare; 1 where a run did not come back the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--single", type=int, default=30, help="kills of runs in a single process")
    parser.add_argument("--ranks", type=int, default=20, help="kills of runs with two ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", default="", help="a file for what was found")
    arguments = parser.parse_args(argv)
    rng = random.Random(arguments.seed)
    kills: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind, extra, count in (("single", [], arguments.single), ("two ranks", RANKS, arguments.ranks)):
            if not count:
                continue
            unbroken = Path(scratch) / f"unbroken-{len(extra)}"
            seconds = _finish(["rollouts", *RUN, *extra, "--out", str(unbroken)], unbroken)
            expected = _result(unbroken)
            while sum(kill["kind"] == kind for kill in kills) < count:
                folder = Path(scratch) / f"run-{len(kills)}"
                found = _one_run(folder, extra, kind, seconds, rng)
                same = _result(folder) == expected
                left = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
                for kill in found:
                    kill |= {"same": same, "left": left}
                kills += found
                words = ", ".join(f"{kill['while']} after step {kill['checkpoint']}" for kill in found)
                print(
                    f"{len(kills)}: {kind}, killed {words}: {'the same' if same and not left else 'NOT THE SAME'}",
                    flush=True,
                )
    moments = Counter(f"{kill['kind']}, {kill['while']}" for kill in kills)
    good = sum(kill["same"] and not kill["left"] for kill in kills)
    print(f"{good} of {len(kills)} kills were survived to the bit: {dict(moments)}")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(kills, indent=1) + "\n")
    return 0 if good == len(kills) else 1


def _one_run(folder: Path, extra: list[str], kind: str, seconds: float, rng: random.Random) -> list[dict[str, Any]]:
    """A run that is killed once or twice, and then finished."""
    kills = []
    command = ["rollouts", *RUN, *extra, "--out", str(folder)]
    for _ in range(1 if rng.random() < 0.7 else 2):
        while_saving = rng.random() < 0.25
        moment = rng.random() * seconds
        done = _kill(command, folder, while_saving, moment)
        if done is None:
            break  # it was finished before the moment came
        kills.append({"kind": kind, "while": done, "checkpoint": _last(folder)})
        command = ["rollouts", "resume", str(folder)]
        if not (folder / "config.toml").exists():
            command = ["rollouts", *RUN, *extra, "--out", str(folder), "--resume", "auto"]
    _finish(command, folder)
    return kills


def _kill(command: list[str], folder: Path, while_saving: bool, moment: float) -> str | None:
    """Start it, kill it `moment` seconds after its folder is there, or while it writes; what it was at, or None."""
    began = time.time()
    process = subprocess.Popen(_python(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        checkpoints = folder / "checkpoints"
        lock = folder / ".lock"
        _wait(lambda: process.poll() is not None or (lock.exists() and lock.stat().st_mtime >= began - 1), process)
        if while_saving:
            earlier = set(_names(checkpoints, ".*writing*"))
            _wait(lambda: process.poll() is not None or bool(set(_names(checkpoints, ".*writing*")) - earlier), process)
        else:
            end = time.monotonic() + moment
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.002)
        if process.poll() is not None:
            return None
        ranks = _children(process.pid)
        writing = bool(_names(checkpoints, ".*writing*"))
        process.kill()
        process.wait()
        _wait(lambda: not any(_is_running(pid) for pid in ranks), process, seconds=40)
        return "saving" if writing else "sampling or training"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _finish(command: list[str], folder: Path) -> float:
    """Run it to its end; the seconds from the folder to the end. Raises RuntimeError where it fails."""
    process = subprocess.Popen(_python(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lock, start = folder / ".lock", None
    while process.poll() is None and start is None:
        start = time.monotonic() if lock.exists() else None
        time.sleep(0.01)
    output, _ = process.communicate(timeout=SECONDS_MAX)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output}")
    return time.monotonic() - (start or time.monotonic())


def _result(folder: Path) -> dict[str, Any]:
    """All that no clock decides."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = folder / "checkpoints" / f"step_{STEPS:06d}"
    manifest = json.loads((last / "manifest.json").read_text())
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines],
        "trajectories": {path.name: _untimed(path) for path in sorted((folder / "trajectories").iterdir())},
        "evaluation": json.loads((folder / "summary.json").read_text())["evaluation"],
        "files": {name: kept for name, kept in manifest["files"].items() if name.endswith(("safetensors", "distcp"))},
    }


def _untimed(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["metrics"].pop("latency_seconds", None)
    return records


def _python(command: list[str]) -> list[str]:
    return [sys.executable, "-m", *command]


def _names(folder: Path, pattern: str) -> list[str]:
    return [path.name for path in folder.glob(pattern)] if folder.exists() else []


def _last(folder: Path) -> int:
    """The step of the last complete checkpoint; 0 where there is none."""
    found = [int(path.parent.name[5:]) for path in (folder / "checkpoints").glob("step_*/manifest.json")]
    return max(found, default=0)


def _wait(condition: Any, process: subprocess.Popen[Any], seconds: float = SECONDS_MAX) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"waited {seconds:g} s in vain for process {process.pid}")
        time.sleep(0.002)


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in path.read_text().split()] if path.exists() else []


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


if __name__ == "__main__":
    sys.exit(main())
