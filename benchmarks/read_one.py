"""How long one trajectory of a million takes to read by the index of its file, and what the index costs a run.

python benchmarks/read_one.py --out /tmp/million [--lines 1000000]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollouts.encoding import encode
from rollouts.runs.folder import CONFIG, RunFolder, episode_records
from rollouts.runs.records import read_record
from rollouts.runs.times import index_of, open_lines, write_index
from rollouts.types import Episode, Message, Score, Segment, Status, Task, Trajectory

PROMPT = 10
STEP_LINES = 512


def episode(number: int, generator: random.Random) -> Episode:
    """An episode of one turn with 10 to 90 sampled tokens."""
    sampled = generator.randrange(10, 90)
    tokens = [generator.randrange(30_000) for _ in range(PROMPT + sampled)]
    segment = Segment(
        tokens,
        [0.0] * PROMPT + [1.0] * sampled,
        [0.0] * PROMPT + [-generator.random() for _ in range(sampled)],
        [-1] * PROMPT + [3] * sampled,
    )
    task = Task(f"What is {number} * 7?", answer=number * 7)
    messages = [*task.messages, Message("assistant", "word " * sampled)]
    own = [Trajectory(task, messages, [segment], Status.COMPLETED)]
    return Episode((number // 8, number % 8), task, own, Score(1.0, {"correct": 1.0}, ""), {})


def write_run(out: Path, count: int, generator: random.Random) -> tuple[RunFolder, list[int]]:
    """A run whose first step has so many trajectories, 512 different ones, and the length of each line."""
    run = RunFolder(out)
    run.write_text(CONFIG, 'mode = "rl"\nmodel = "tiny"\n')
    lines = [encode(record) + b"\n" for record in step_lines(generator)]
    with open(run.path / "trajectories" / "step_000000.jsonl", "wb") as opened:
        for number in range(count):
            opened.write(lines[number % STEP_LINES])
    return run, [len(lines[number % STEP_LINES]) for number in range(count)]


def step_lines(generator: random.Random) -> list[dict[str, Any]]:
    """The trajectories of a step."""
    episodes = [episode(number, generator) for number in range(STEP_LINES)]
    return [record for each in episodes for record in episode_records(each, advantage=0.5)]


def timed(do: Callable[[], object]) -> float:
    """The seconds of a call."""
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=1_000_000)
    given = parser.parse_args()
    generator = random.Random(0)
    run, lengths = write_run(given.out, given.lines, generator)
    file = given.out / "trajectories" / "step_000000.jsonl"
    records = step_lines(random.Random(0))
    wrote = timed(lambda: write_index(file, lengths))
    print(f"{given.lines} lines, {file.stat().st_size / 1e9:.2f} GB")
    print(f"index: {index_of(file).stat().st_size / 1e6:.1f} MB, written in {wrote:.2f} s")
    places = [generator.randrange(given.lines) for _ in range(21)]
    reads = [timed(lambda place=place: read_record(given.out, 0, place)) for place in places]  # type: ignore[misc]
    print(f"read_record: {statistics.median(reads) * 1e3:.1f} ms (median of {len(reads)})")
    opened_lines = open_lines(file)
    reads = [timed(lambda place=place: opened_lines.read(place)) for place in places]  # type: ignore[misc]
    print(f"a line of opened lines: {statistics.median(reads) * 1e3:.3f} ms")
    index_of(file).unlink()
    print(f"the index made anew: {timed(lambda: open_lines(file)):.2f} s")
    whole = [timed(lambda step=step: run.write_trajectories(f"step_{step:06d}", records)) for step in range(1, 22)]  # type: ignore[misc]
    written = run.path / "trajectories" / "step_000001.jsonl"
    own = [timed(lambda: write_index(written, lengths[:STEP_LINES])) for _ in whole]
    print(
        f"a step of {STEP_LINES} lines: {statistics.median(whole) * 1e3:.1f} ms with its index, "
        f"whose part is {statistics.median(own) * 1e3:.2f} ms and {index_of(written).stat().st_size} bytes"
    )


if __name__ == "__main__":
    main()
