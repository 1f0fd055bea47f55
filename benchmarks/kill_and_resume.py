"""Does every run survive kill -9? Kill runs at random moments, resume them, and compare the results bit by bit.

    python benchmarks/kill_and_resume.py                                  # 60 kills, of each kind in turn
    python benchmarks/kill_and_resume.py --kills 20 --kinds ranks
    python benchmarks/kill_and_resume.py --kills 4 --kinds plain,staleness --out kills.json

A run trains the embedded model on the calculator: 6 steps of 2 prompts x 4 rollouts, with a checkpoint after each. One
of four kills waits until a checkpoint is being written; the others come at a random time. A run may be killed again
while it resumes. The kind `checkpoint` is killed while it goes back to an earlier checkpoint.

The result is compared with a run that was not killed: all metrics that do not depend on the clock, all trajectories (so
that no prompt is lost or trained on twice), and the weights and moments of the last checkpoint. With over-sampling and
staleness, two runs always differ. There, the script checks that each step is logged once, and that each group is
trained on once, with all its rollouts. No incomplete files may be left, and no rank may live longer than rank 0.

A kill takes about a minute on one core. The kind `ranks` uses two processes.
"""

from __future__ import annotations

import argparse
import itertools
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

STEPS, PROMPTS, SAMPLES = 6, 2, 4
RUN = [
    "run", "--env", "calculator", "--steps", str(STEPS), "--prompts-per-step", str(PROMPTS),
    "--samples-per-prompt", str(SAMPLES), "--max-tokens", "32", "--eval-tasks", "8", "--checkpoint-every", "1",
]  # fmt: skip
KINDS = {
    "plain": [],
    "lora": ["--lora-rank", "4"],
    "ppo": ["--loss", "ppo", "--critic", "head"],
    "sft": ["--mode", "sft"],
    "over-sampling": ["--over-sampling", "1.5"],
    "staleness": ["--staleness", "2"],
    "checkpoint": [],
    "ranks": ["--training", "fsdp", "--training.processes", "2"],
}
RACES = ("over-sampling", "staleness")  # the clock decides which groups finish first
TIMED = ("time/", "perf/", "sync/seconds", "rollout/latency")
SECONDS_MAX = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, resume and compare. Returns 1 if a result differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="in all")
    parser.add_argument("--kinds", default=",".join(kind for kind in KINDS if kind != "ranks"), help="some of KINDS")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", default="", help="a file for what was found")
    arguments = parser.parse_args(argv)
    rng = random.Random(arguments.seed)
    kills: list[dict[str, Any]] = []
    unbroken: dict[str, tuple[float, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, kind in enumerate(itertools.cycle(arguments.kinds.split(","))):
            if len(kills) >= arguments.kills:
                break
            if kind not in unbroken:
                whole = Path(scratch) / f"unbroken-{kind}"
                seconds = finish(begin(whole, kind), whole)
                unbroken[kind] = seconds, result(whole, kind)
            seconds, expected = unbroken[kind]
            folder = Path(scratch) / f"run-{number}"
            found = _one_run(folder, kind, seconds, rng)
            faults = compare(folder, kind, expected)
            kills += [kill | {"kind": kind, "faults": faults} for kill in found]
            words = ", ".join(f"{kill['while']} after step {kill['checkpoint']}" for kill in found) or "never"
            print(f"{len(kills)}: {kind}, killed {words}: {'; '.join(faults) or 'the same'}", flush=True)
    moments = Counter(f"{kill['kind']}, {kill['while']}" for kill in kills)
    good = sum(not kill["faults"] for kill in kills)
    print(f"{good} of {len(kills)} kills were survived: {dict(moments)}")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(kills, indent=1) + "\n")
    return 0 if good == len(kills) else 1


def begin(folder: Path, kind: str, *more: str) -> list[str]:
    """The command of a new run."""
    return ["rollouts", *RUN, *KINDS[kind], "--out", str(folder), *more]


def go_on(folder: Path, kind: str) -> list[str]:
    """The command that resumes a killed run, or starts it if it has no folder yet."""
    if not (folder / "config.toml").exists():
        return begin(folder, kind, "--resume", "auto")
    return ["rollouts", "resume", str(folder)]


def _one_run(folder: Path, kind: str, seconds: float, rng: random.Random) -> list[dict[str, Any]]:
    """Start a run, kill it once or twice, and finish it."""
    kills = []
    command = begin(folder, kind)
    if kind == "checkpoint":
        finish(command, folder)
        command = _back(folder, rng)
    for _ in range(1 if rng.random() < 0.7 else 2):
        done = _kill(command, folder, rng.random() < 0.25, rng.random() * seconds)
        if done is None:
            return kills  # the run finished before the kill
        kills.append({"while": done, "checkpoint": _last(folder)})
        command = go_on(folder, kind)
    finish(command, folder)
    return kills


def _back(folder: Path, rng: random.Random) -> list[str]:
    step = rng.randrange(1, STEPS)
    return ["rollouts", "resume", str(folder), "--checkpoint", f"step_{step:06d}"]


def compare(folder: Path, kind: str, expected: Any) -> list[str]:
    """The differences from a run that was not killed, in words."""
    found = result(folder, kind)
    faults = [f"{name} differs" for name, value in expected.items() if found[name] != value]
    left = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
    return faults + [f"{name} is left" for name in left]


def _kill(command: list[str], folder: Path, while_saving: bool, moment: float) -> str | None:
    """Start the run and kill it `moment` seconds after its folder exists, or while it writes a checkpoint. Returns what
    it was doing, or None.
    """
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
            if process.returncode != 0:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} by itself")
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


def finish(command: list[str], folder: Path) -> float:
    """Finish the run. Returns the seconds since its folder existed. Raises RuntimeError if the run fails."""
    process = subprocess.Popen(_python(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lock, start = folder / ".lock", None
    while process.poll() is None and start is None:
        start = time.monotonic() if lock.exists() else None
        time.sleep(0.01)
    output, _ = process.communicate(timeout=SECONDS_MAX)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output}")
    return time.monotonic() - (start or time.monotonic())


def result(folder: Path, kind: str) -> dict[str, Any]:
    """All results that do not depend on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = folder / "checkpoints" / f"step_{STEPS:06d}"
    manifest = json.loads((last / "manifest.json").read_text())
    trajectories = {path.name: _untimed(path) for path in sorted((folder / "trajectories").glob("*.jsonl"))}
    if kind in RACES:
        played = Counter(record["group"] for records in trajectories.values() for record in records)
        return {
            "steps": [line["step"] for line in lines],
            "trajectories": list(trajectories),
            "groups": Counter(played.values()),
            "files": sorted(manifest["files"]),
        }
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines],
        "trajectories": trajectories,
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
    """The step of the last complete checkpoint; 0 if there is none."""
    found = [path.parent.name[5:] for path in (folder / "checkpoints").glob("step_*/manifest.json")]
    return max((int(name) for name in found if name.isdigit()), default=0)


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
