"""The evaluations of a training run, also while training goes on.

With `--eval-inference`, an evaluation between two steps has an engine of its own, which gets the weights of that step.
Training goes on while it plays, and at most one plays at a time: the next one waits for it. Not here: when a run
evaluates, and what the run does with the results (`train`).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import trio

from rollouts.errors import cause_of, counted
from rollouts.evaluate import Evaluation, check_passes, evaluate, evaluation_metrics
from rollouts.inference.base import InferenceBackend
from rollouts.loggers.jsonl import read_lines
from rollouts.runs.folder import EVALUATED, METRICS, episode_records
from rollouts.runs.jobs.saving import ranking_of
from rollouts.runs.resume import RunState
from rollouts.runs.sample_rows import EVAL_SAMPLES, held_out_rollouts
from rollouts.runs.session import Player, Session
from rollouts.runs.times import evaluation_times
from rollouts.training.batches import TrainingBackend
from rollouts.training.batching import make_batch
from rollouts.training.rollout_gen.groups import GroupScorer
from rollouts.training.rollout_gen.pool import Failures, Job
from rollouts.training.weights.store import write_metric
from rollouts.training.weights.sync import WeightSyncManager
from rollouts.types import Episode, Sample, Task

TEMPERATURES = (1.0, 0.0)  # sampled, greedy


@dataclass(frozen=True)
class HeldOutTasks:
    """The held-out tasks of a run, and how they are played."""

    tasks: Sequence[Task]
    session: Session
    player: Player
    score_groups: GroupScorer | None
    failures: Failures

    @property
    def plays(self) -> bool:
        """Whether there is anything to evaluate."""
        return bool(self.tasks and self.player.rewards)

    async def measure(self, when: str, done: int, inference: InferenceBackend, *, shows: bool = True) -> dict[str, Any]:
        """The results of an evaluation after `done` steps, in the form of summary.json. The episodes are kept in
        `trajectories/eval_*.jsonl`. `shows`: the observer and the loggers see the episodes.

        Raises RewardError, RunError.
        """
        settings, observer, folder = self.player.settings, self.session.observer, self.session.folder
        reports, total = [], len(self.tasks) * len(TEMPERATURES)
        ended: dict[tuple[float, tuple[int, ...]], Episode] = {}  # by (minus the temperature, order)
        if shows:
            observer.evaluating(when, 0, total)

        def on_end(job: Job, episode: Episode, *, temperature: float) -> None:
            ended[-temperature, job.order] = episode
            if shows:
                observer.evaluating(when, len(ended), total)

        def keep() -> None:
            played = sorted(ended.items(), key=lambda each: each[0])
            records = ({"temperature": -t} | line for (t, _), each in played for line in episode_records(each))
            folder.write_trajectories(f"{EVALUATED}{done:06d}", records)
            folder.write_times(f"{EVALUATED}{done:06d}", evaluation_times([each for _, each in played]))

        try:
            for temperature in TEMPERATURES:
                report, episodes = await evaluate(
                    self.tasks,
                    play=self.player.at(temperature, settings.seed + 1),
                    inference=inference,
                    score_groups=self.score_groups,
                    concurrency=settings.concurrency,
                    failures=self.failures.beside(),
                    on_end=functools.partial(on_end, temperature=temperature),
                )
                reports.append(report)
                ended |= {(-temperature, each.order): each for each in episodes}
        except Exception:
            keep()  # the episodes show why the evaluation failed
            raise
        keep()
        if shows:
            self.session.loggers.log_samples(EVAL_SAMPLES, held_out_rollouts(ended), max(done - 1, 0))
        for words in check_passes(reports, list(ended.values()), when):
            observer.note(words)
        return Evaluation(*reports).as_dict()


# --- while training goes on -------------------------------------------------------------------------------------------


class Finished(NamedTuple):
    """The results of an evaluation of the weights after `done` steps."""

    done: int
    evaluation: dict[str, Any]


class Evaluator:
    """Evaluates a training run before its first step, between steps, and after its last one. With a second engine, the
    evaluations between steps play while training goes on, one at a time. Use `entered` first.

    `results` are those before and after. `late` are the metrics of evaluations beside training that ended after their
    step was logged. `pending` is the number of steps of the one that plays, or whose results were not taken yet; 0:
    there is none.
    """

    def __init__(
        self, own: HeldOutTasks, loss: HeldOutLoss, backend: TrainingBackend, engines: Sequence[InferenceBackend]
    ) -> None:
        self.own, self.loss, self._backend = own, loss, backend
        self._engine, *beside = engines
        self._beside = next(iter(beside), None)
        self._syncing = WeightSyncManager(beside, temperature=own.player.settings.temperature)
        self.results: dict[str, dict[str, Any] | None] = {"before": None, "after": None}
        self.late: dict[str, float] = {}
        self.pending = 0
        self._last: Finished | None = None
        self._finished: Finished | None = None
        self._ended = trio.Event()
        self._nursery: trio.Nursery | None = None

    @property
    def is_beside(self) -> bool:
        """Whether evaluations between steps play while training goes on."""
        return self._beside is not None

    @contextlib.asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Start the second engine, if there is one. The end of the block waits for the evaluation that plays; an error
        ends it.
        """
        if self._beside is None:
            yield
            return
        async with self._beside:
            try:
                async with trio.open_nursery() as self._nursery:
                    yield
            except BaseExceptionGroup as group:
                cause = cause_of(group)
                raise cause from cause.__cause__

    async def evaluate(self, when: str, done: int) -> dict[str, float]:
        """Evaluate the held-out tasks after `done` steps, once per temperature. Returns the `eval/` metrics; empty if
        there are no held-out tasks.
        """
        loss = await self.loss.measure(done, self.own.player.settings.prompts_per_step)
        if not self.own.plays:
            return loss
        # These weights may have been evaluated just before the run stopped.
        if when != "after" or not done or self._last is None or self._last.done != done:
            self._last = Finished(done, await self.own.measure(when, done, self._engine))
        evaluation = self._last.evaluation
        if when in self.results:
            self.results[when] = evaluation
        self.own.session.observer.evaluation(when, evaluation)
        return loss | evaluation_metrics(evaluation)

    async def between(self, done: int) -> dict[str, float]:
        """Evaluate between two steps. Beside training, it begins after the evaluation before has ended, and only
        metrics of this step are returned.
        """
        if self._beside is None:
            return await self.evaluate(f"step {done}", done)
        waited = await self.wait()
        self.take()
        loss = await self.loss.measure(done, self.own.player.settings.prompts_per_step)
        return {**loss, "time/eval_wait": waited, **await self._start(done)} if self.own.plays else loss

    async def _start(self, done: int) -> dict[str, float]:
        """Give the second engine the weights after `done` steps, and begin to evaluate them. Returns `time/` metrics.
        Raises InferenceError.
        """
        assert self._nursery is not None and not self.pending, f"the evaluation after step {self.pending} is pending"
        synced = await self._syncing.sync(self._backend)
        self.pending, self._ended = done, trio.Event()
        self._nursery.start_soon(self._play_beside, done)
        return {"time/eval_sync": synced["sync/seconds"]}

    async def _play_beside(self, done: int) -> None:
        assert self._beside is not None, "started without a second engine"
        self._finished = Finished(done, await self.own.measure(f"step {done}", done, self._beside, shows=False))
        self._ended.set()

    async def wait(self) -> float:
        """Wait until the evaluation that plays beside training has ended, if there is one. Returns the seconds."""
        began = time.perf_counter()
        if self.pending:
            await self._ended.wait()
        return time.perf_counter() - began

    def take(self) -> None:
        """Log the results of an evaluation beside training that has ended under its step, and rank its checkpoint by
        them.
        """
        if (found := self._finished) is None:
            return
        self._last, self._finished, self.pending = found, None, 0
        metrics, session = evaluation_metrics(found.evaluation), self.own.session
        self.late |= metrics
        session.observer.evaluation(f"step {found.done}", found.evaluation)
        session.loggers.add(metrics, found.done - 1)
        path = session.folder.checkpoint_path(found.done)
        ranked = ranking_of(self.own.player.settings, evaluates=True).value(metrics)
        if ranked is not None and path.exists():
            write_metric(path, ranked)

    async def resume(self, state: RunState) -> None:
        """Begin again with the evaluation that was pending when a checkpoint was written, if it has these weights. Else
        note that the results are lost, unless metrics.jsonl has them, because the run went on before it ended.
        """
        self.results["before"], session = state.evaluation.get("before"), self.own.session
        if not state.evaluating:
            return
        if self._beside is not None and state.evaluating == state.step:
            await self._start(state.step)
            return
        lines = (line for step, line, _ in read_lines(session.folder.path / METRICS) if step == state.evaluating - 1)
        if not any(name.startswith("eval/") for line in lines for name in line):
            session.observer.note(f"the evaluation after step {state.evaluating} was not finished, and is left out")


# --- supervised training ----------------------------------------------------------------------------------------------


class HeldOutLoss:
    """The loss of held-out samples. `by_step` has it by the number of steps before it, for summary.json."""

    def __init__(self, backend: TrainingBackend, samples: Sequence[Sample], note: Callable[[str], None]) -> None:
        self._backend, self._samples, self._note = backend, samples, note
        self.by_step: dict[str, float] = {}

    async def measure(self, done: int, per_batch: int) -> dict[str, float]:
        """The mean negative log-likelihood of the trained tokens after `done` steps, by their weights, in nats per
        token. Empty without samples.
        """
        if not self._samples:
            return {}
        if str(done) not in self.by_step:
            self.by_step[str(done)] = await held_out_loss(self._backend, self._samples, per_batch)
            self._note(f"held-out loss after {counted(done, 'step')}: {self.by_step[str(done)]:.4f}")
        return {"eval/loss": self.by_step[str(done)]}


async def held_out_loss(backend: TrainingBackend, samples: Sequence[Sample], per_batch: int) -> float:
    """The mean negative log-likelihood of the trained tokens of samples, by their weights, in nats per token."""
    total = weight = 0.0
    for start in range(0, len(samples), per_batch):
        some = [Sample(tokens=each.tokens, loss_mask=each.loss_mask) for each in samples[start : start + per_batch]]
        batch = make_batch(some, [0.0] * len(some), aggregation="token_mean", step=0)
        found = (await backend.forward(batch, only_live=True)).logprobs
        assert found is not None, "logprobs were requested"
        for row, logprobs in zip(batch.rows, found, strict=True):
            total -= sum(w * p for w, p in zip(row.loss_mask, logprobs, strict=True))
            weight += sum(row.loss_mask)
    return total / weight
