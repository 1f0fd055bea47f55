"""Seconds per step: over-sampling with carried-over episodes, compared with waiting for the slowest, in one run.

    OMP_NUM_THREADS=1 python benchmarks/carry_over.py
    OMP_NUM_THREADS=1 python benchmarks/carry_over.py --steps 40 --json figures.json

The manager, the pool and the gate are real, and run on trio with the real clock. The engine is not: it sleeps for each
reply, `--token-seconds` for each token, and returns the tokens so far when it is stopped. Training sleeps too. So the
figures show the gain if the engine has room for 50% more rollouts; a full engine would slow down by as much. The
lengths of replies are log-normal, cut off at `--max-tokens`, and depend only on the rollout's order, so all ways have
the same rollouts.

The ways: `wait` (factor 1), `carry` (incomplete rollouts continue in the next step), and `discard` (the same factor,
but incomplete rollouts start again from their first token). The difference between the last two is what carrying saves.
The ways take steps in turn, so that a busy machine affects all of them. Seconds are means of `RolloutStep.seconds`.
`sampled` is the number of tokens that the engine made for each token that was handed out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import trio
from rollouts_notes.manager import AsyncRolloutManager
from rollouts_notes.rows import RolloutConfig

from rollouts.inference.base import Capabilities, GenerateRequest, Generation, InferenceBackend, VersionSpan
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.pool import Job
from rollouts.types import Episode, Score, Segment, Status, Trajectory

PROMPTS, MEMBERS = 16, 8


class SleepingEngine:
    """An engine that sleeps for each token. A reply can be stopped."""

    capabilities = Capabilities(in_process=True, aborts=True)
    vocabulary_size = version = 0
    context_tokens_max = 1_000_000

    def __init__(self, token_seconds: float, max_tokens: int) -> None:
        self.token_seconds, self.max_tokens = token_seconds, max_tokens
        self.sampled = 0
        self._stops: dict[str, trio.Event] = {}

    def length(self, order: tuple[int, ...]) -> int:
        """The number of tokens in this rollout's reply."""
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
    """Generate one reply."""
    reply = await inference.generate(GenerateRequest([1], 10**6, (), 0, order=(*job.order, 0), session=session))
    count = len(reply.tokens)
    segment = Segment([1, *reply.tokens], [0.0] + [1.0] * count, [0.0, *reply.logprobs], [-1, *reply.versions])
    trajectory = Trajectory(job.task, job.task.messages, [segment], Status.COMPLETED)
    return Episode(job.order, job.task, [trajectory], Score(float(job.order[1])), {})


class Way(NamedTuple):
    """One way of taking steps, with its measurements."""

    name: str
    manager: AsyncRolloutManager
    engine: SleepingEngine
    seconds: list[float]
    tokens: list[int]

    async def step(self) -> None:
        """Take one step."""
        found = await self.manager.generate_batch()
        self.seconds.append(found.seconds)
        self.tokens.append(sum(e.trajectory.sampled_count for g in found.groups for e in g.episodes))

    def figures(self, baseline: float) -> dict[str, float]:
        """Means, and their ratio to the baseline."""
        seconds = statistics.fmean(self.seconds)
        return {
            "step_seconds": seconds,
            "ratio": seconds / baseline,
            "tokens_per_rollout": statistics.fmean(self.tokens) / (PROMPTS * MEMBERS),
            "sampled_per_token": self.engine.sampled / sum(self.tokens),
        }


def make_way(name: str, factor: float, options: argparse.Namespace) -> Way:
    """A manager with its own engine."""
    engine = SleepingEngine(options.token_seconds, options.max_tokens)
    config = RolloutConfig(PROMPTS, MEMBERS, factor, concurrency=4 * PROMPTS * MEMBERS)
    buffer = DataBuffer([f"task {number}" for number in range(1000)])
    manager = AsyncRolloutManager(buffer, config, play=play, inference=engine)  # type: ignore[arg-type]
    return Way(name, manager, engine, [], [])


async def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Take steps in all ways, in turn."""
    wait, carry = make_way("wait", 1.0, options), make_way("carry", options.factor, options)
    discard = make_way("discard", options.factor, options)
    async with wait.manager, carry.manager:  # outside of its `async with` block, the third way carries nothing over
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
