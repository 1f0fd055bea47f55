"""Kill workers with SIGKILL at random moments of a training run, and check what is left.

    python benchmarks/kill_workers.py [--kills 100] [--workers 2] [--seed 0] [--minutes 3]

It prints how many kills there were, how many steps and rollouts were played, and how many of them failed or were
retried. It fails if a step lacks a rollout of a prompt, if the run does not reach its end, or if a process is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

import rollouts

PROMPTS, SAMPLES = 4, 4


def worker_processes() -> list[psutil.Process]:
    """The workers of this process, without their supervisors."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = " ".join(child.cmdline())
            found += [child] if "env.workers.process" in words and "supervisor.py" not in words else []
    return found


class Killer(threading.Thread):
    """Kills one worker after another at random moments, once the run has begun."""

    def __init__(self, count: int, seed: int, begins: Path) -> None:
        super().__init__(daemon=True)
        self.count, self.killed, self.over = count, 0, threading.Event()
        self._random, self._begins = random.Random(seed), begins

    def run(self) -> None:
        while not self._begins.exists() and not self.over.wait(0.05):
            pass
        while self.killed < self.count and not self.over.wait(self._random.uniform(0.5, 5.0)):
            if found := worker_processes():
                with contextlib.suppress(psutil.Error):
                    self._random.choice(found).kill()
                    self.killed += 1


def main(kills: int, workers: int, seed: int, minutes: float) -> None:
    """Run, kill, count."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        killer = Killer(kills, seed, out / "config.toml")
        killer.start()
        begun = time.perf_counter()
        summary = rollouts.run(
            env="calculator",
            worker={"kind": "process", "count": workers},
            out=str(out),
            steps=100_000,
            max_hours=minutes / 60,
            prompts_per_step=PROMPTS,
            samples_per_prompt=SAMPLES,
            eval_tasks=8,
            retries=3,
        )
        killer.over.set()
        killer.join()
        steps, statuses, metrics = 0, Counter[str](), Counter[str]()
        for file in sorted(out.glob("trajectories/step_*.jsonl")):
            episodes = [json.loads(line) for line in file.read_text().splitlines()]
            assert len(episodes) == PROMPTS * SAMPLES, f"{file.name} has {len(episodes)} rollouts"
            statuses.update(episode["status"] for episode in episodes)
            steps += 1
        for line in (out / "metrics.jsonl").read_text().splitlines():
            values = json.loads(line)
            metrics.update({name: values.get(name, 0) for name in ("perf/worker_deaths", "rollout/retried")})
        assert summary["status"] == "done", summary
        print(f"{killer.killed} kills in {time.perf_counter() - begun:.0f} s; {steps} steps, {summary['steps']} done")
        print(f"rollouts by status: {dict(statuses)}")
        print(f"worker deaths: {summary.get('worker_deaths', 0)}, by step {metrics['perf/worker_deaths']:.0f}")
        print(f"retried rollouts: {metrics['rollout/retried']:.0f}")
    left = worker_processes()
    assert not left, left
    print(f"no worker is left of process {os.getpid()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=6.0)
    given = parser.parse_args()
    main(given.kills, given.workers, given.seed, given.minutes)
