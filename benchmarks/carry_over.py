"""Seconds per step: over-sampling with episodes carried over, beside waiting for the slowest, in one run.

    OMP_NUM_THREADS=1 python benchmarks/carry_over.py
    OMP_NUM_THREADS=1 python benchmarks/carry_over.py --steps 40 --json figures.json

Real: the manager, the pool and the gate, on trio and the real clock. Not real: the engine. It sleeps for each reply
as long as its tokens take at `--token-seconds`, whatever else is asked of it, and gives back what it has when it is
told to stop; a step of training is a sleep too. So the figures say what carrying over is worth where the engine has
room for half as many rollouts again; an engine that is full slows down by as much. Lengths are log-normal and cut off
at `--max-tokens`, a function of the rollout's order: every way plays the same ones, as far as it comes.

Ways: `wait` (factor 1), `carry` (what is not complete goes on in the next step), `discard` (the same factor, but what
is not complete is played again from its first token: what carrying saves). One step of each way follows one of the
others, so that a busy machine moves all. Seconds are the means of `RolloutStep.seconds`; `sampled` counts the tokens
that the engine made for each that was handed out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import trio

from rollouts.inference.base import Capabilities, GenerateRequest, Generation, InferenceBackend, VersionSpan
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.manager import AsyncRolloutManager
from rollouts.training.rollout_gen.pool import Job
from rollouts.training.rollout_gen.steps import RolloutConfig
from rollouts.types import Episode, Score, Segment, Status, Trajectory

PROMPTS, MEMBERS = 16, 8


class SleepingEngine:
    """A reply takes as long as its tokens; it can be stopped."""

    capabilities = Capabilities(in_process=True, aborts=True)
    vocabulary_size = version = 0
    context_tokens_max = 1_000_000

    def __init__(self, token_seconds: float, max_tokens: int) -> None:
        self.token_seconds, self.max_tokens = token_seconds, max_tokens
        self.sampled = 0
        self._stops: dict[str, trio.Event] = {}

    def length(self, order: tuple[int, ...]) -> int:
        """Tokens of this rollout's reply."""
        drawn = random.Random(str(order[:2])).lognormvariate(5.0, 1.0)
        return max(1, min(int(drawn), self.max_tokens))

    def open_session(self, order: tuple[int, ...]) -> str:
        return ".".join(map(str, order))

    def close_session(self, session: str) -> None:
        return None

    async def abort(self, session: str) -> None:
        if session in self._stops:
            self._stops[session].set()

    async def generate(self, request: GenerateRequest) -> Generation:
        assert request.session is not None
        stop = self._stops[request.session] = trio.Event()
        left = self.length(request.order) - request.offset
        began = trio.current_time()
        count = 0
        try:
            with trio.move_on_after(left * self.token_seconds):
                await stop.wait()
        finally:
            del self._stops[request.session]
            count = min(left, int((trio.current_time() - began) / self.token_seconds)) if stop.is_set() else left
            self.sampled += count
        spans = [VersionSpan(0, 0, count)] if count else []
        return Generation([7] * count, [-0.5] * count, "stop" if count == left else "abort", spans)


async def play(job: Job, session: str, inference: InferenceBackend) -> Episode:
    """One reply."""
    reply = await inference.generate(GenerateRequest([1], 10**6, (), 0, order=(*job.order, 0), session=session))
    count = len(reply.tokens)
    segment = Segment([1, *reply.tokens], [0.0] + [1.0] * count, [0.0, *reply.logprobs], [-1, *reply.versions])
    trajectory = Trajectory(job.task, job.task.messages, [segment], Status.COMPLETED)
    return Episode(job.order, job.task, [trajectory], Score(float(job.order[1])), {})


class Way(NamedTuple):
    """One way of taking steps, and what was seen of it."""

    name: str
    manager: AsyncRolloutManager
    engine: SleepingEngine
    seconds: list[float]
    tokens: list[int]

    async def step(self) -> None:
        """Take one."""
        found = await self.manager.generate_batch()
        self.seconds.append(found.seconds)
        self.tokens.append(sum(e.trajectory.sampled_count for g in found.groups for e in g.episodes))

    def figures(self, baseline: float) -> dict[str, float]:
        """Means, and the ratio to the baseline's."""
        seconds = statistics.fmean(self.seconds)
        return {
            "step_seconds": seconds,
            "ratio": seconds / baseline,
            "tokens_per_rollout": statistics.fmean(self.tokens) / (PROMPTS * MEMBERS),
            "sampled_per_token": self.engine.sampled / sum(self.tokens),
        }


def make_way(name: str, factor: float, options: argparse.Namespace) -> Way:
    """A manager with an engine of its own."""
    engine = SleepingEngine(options.token_seconds, options.max_tokens)
    config = RolloutConfig(PROMPTS, MEMBERS, factor, concurrency=4 * PROMPTS * MEMBERS)
    buffer = DataBuffer([f"task {number}" for number in range(1000)])
    manager = AsyncRolloutManager(buffer, config, play=play, inference=engine)  # type: ignore[arg-type]
    return Way(name, manager, engine, [], [])


async def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """All ways, a step of each in turn."""
    wait, carry = make_way("wait", 1.0, options), make_way("carry", options.factor, options)
    discard = make_way("discard", options.factor, options)
    async with wait.manager, carry.manager:  # outside of its block the third one carries nothing over
        for number in range(options.steps + options.warm_up):
            if number == options.warm_up:
                for way in (wait, carry, discard):
                    way.seconds.clear()
                    way.tokens.clear()
                    way.engine.sampled = 0
            for way in (wait, carry, discard):
                await way.step()
                await trio.sleep(options.train_seconds)
    baseline = statistics.fmean(wait.seconds)
    return {way.name: way.figures(baseline) for way in (wait, carry, discard)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5, help="steps that are not counted")
    parser.add_argument("--factor", type=float, default=1.5)
    parser.add_argument("--token-seconds", type=float, default=0.0005)
    parser.add_argument("--max-tokens", type=int, default=2000)
    parser.add_argument("--train-seconds", type=float, default=0.05)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    figures: dict[str, Any] = trio.run(measure, options)
    print(f"{PROMPTS} prompts x {MEMBERS} rollouts a step, factor {options.factor:g}, {options.steps} steps")
    print(f"{'':10}{'s/step':>10}{'ratio':>8}{'tokens/rollout':>16}{'sampled/token':>15}")
    for name, each in figures.items():
        print(
            f"{name:10}{each['step_seconds']:>10.3f}{each['ratio']:>8.2f}{each['tokens_per_rollout']:>16.0f}"
            f"{each['sampled_per_token']:>15.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
