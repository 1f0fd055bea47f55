"""Seconds per step: sampling ahead (`staleness` 1 and 2) compared with sampling and training in turn, in one run.

    OMP_NUM_THREADS=1 python benchmarks/pipelining.py
    OMP_NUM_THREADS=1 python benchmarks/pipelining.py --train-seconds 0.8 --json figures.json

The loop, the manager, the pool and the gate are real, and run on trio with the real clock. The engine is not: it sleeps
for each token (benchmarks/carry_over.py). The trainer is not: it sleeps for `--train-seconds` in its own thread, as
torch would compute. The lengths of replies are long-tailed and depend only on the rollout's order. The ways run one
after another, each with its own engine. `generate` is the mean of `time/generate`. The expected time of a step is
max(generate, train) if both run at the same time, and generate + train if not. The first step of each way is left out:
nothing runs beside its sampling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import trio
from carry_over import MEMBERS, PROMPTS, SleepingEngine, play
from rollouts_notes.manager import AsyncRolloutManager
from rollouts_notes.rows import RolloutConfig

from rollouts.inference.base import WeightUpdate
from rollouts.models.futures import TorchThread
from rollouts.training.algorithms.algorithm import Stage
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.batches import StepResult, TrainBatch
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops.rl import train_rl
from rollouts.training.loops.rl_batch import RLSettings
from rollouts.training.weights.sync import WeightSyncManager


class VersionedEngine(SleepingEngine):
    """An engine that only records the version of its weights."""

    async def update_weights(self, update: WeightUpdate) -> None:
        """Record the version; no weights are sent."""


class SleepingTrainer:
    """A training backend whose steps sleep for a given time."""

    def __init__(self, seconds: float) -> None:
        self.version, self.seconds, self.thread = 0, seconds, TorchThread("sleeping-trainer")

    def forward_backward(self, batch: TrainBatch) -> Any:
        """Sleep."""
        return self.thread.submit(self._sleep)

    def optim_step(self) -> Any:
        """Count."""
        return self.thread.submit(self._step)

    def _sleep(self) -> dict[str, float]:
        time.sleep(self.seconds)
        return {"policy/loss": 0.0}

    def _step(self) -> StepResult:
        self.version += 1
        return StepResult({}, self.version)


async def measure(staleness: int, factor: float, options: argparse.Namespace) -> dict[str, float]:
    """Means over the steps after the first."""
    engine, trainer = VersionedEngine(options.token_seconds, options.max_tokens), SleepingTrainer(options.train_seconds)
    buffer = DataBuffer([f"task {number}" for number in range(1000)])
    config = RolloutConfig(PROMPTS, MEMBERS, factor, concurrency=4 * PROMPTS * MEMBERS, staleness=staleness)
    manager = AsyncRolloutManager(buffer, config, play=play, inference=engine)  # type: ignore[arg-type]
    loop = RLSettings(options.steps + 1, staleness=staleness)
    async with manager:
        stages, syncing = [Stage(0, "main", GRPO)], WeightSyncManager([engine])  # type: ignore
        history = await train_rl(trainer, manager, loop, stages=stages, syncing=syncing)  # type: ignore
    trainer.thread.close()
    lines = history[1:]
    step, generate = (statistics.fmean(line[f"time/{name}"] for line in lines) for name in ("step", "generate"))
    train = statistics.fmean(line["time/forward_backward"] for line in lines)
    expected = max(generate, train) if staleness else generate + train
    return {
        "step_seconds": step,
        "generate_seconds": generate,
        "train_seconds": train,
        "expected_seconds": expected,
        "step_over_expected": step / expected,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--token-seconds", type=float, default=0.0005)
    parser.add_argument("--max-tokens", type=int, default=800)
    parser.add_argument("--train-seconds", type=float, default=0.4)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    ways = {"0": (0, 1.0), "1": (1, 1.0), "2": (2, 1.0), "1, over-sampling 1.5": (1, 1.5)}
    figures = {name: trio.run(measure, *way, options) for name, way in ways.items()}
    baseline = figures["0"]["step_seconds"]
    print(f"{PROMPTS} prompts x {MEMBERS} rollouts a step, {options.steps} steps a way")
    print(f"{'staleness':22}{'s/step':>9}{'ratio':>8}{'generate':>10}{'train':>8}{'expected':>10}{'/ it':>7}")
    for name, each in figures.items():
        print(
            f"{name:22}{each['step_seconds']:>9.3f}{each['step_seconds'] / baseline:>8.2f}"
            f"{each['generate_seconds']:>10.3f}{each['train_seconds']:>8.3f}{each['expected_seconds']:>10.3f}"
            f"{each['step_over_expected']:>7.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
