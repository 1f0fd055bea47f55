"""EpisodePool: plays episodes concurrently, up to a limit. It can suspend them in mid-reply, and resume them.

    episodes = await run_episodes(jobs, play, inference, concurrency=64)

The set of playing episodes determines the batches of an engine in this process. For equal results in each run, this set
may depend on counts only, not on the order in which trio runs tasks or on the time that a reward takes. Therefore
sessions are opened before their tasks run. When an episode closes its session, the session of its successor is opened
first.

While the pool is closed, no new reply begins. Episodes that need one wait at the turn gate, in memory, and do not count
as playing. Not here: what is played, and when the pool is closed (`manager`).

    failures = Failures(FailurePolicy(retries=1, max_failures=0.5))
    kept = failures.settle(outcome, job.order)  # None: play the same job again; RunError: too many failures

A failure is an infrastructure failure (`Status`), which says nothing about the policy. An aborted episode is not a
failure. An episode is retried if a second attempt may succeed: the engine failed, or the environment could not be made
or set up. A timeout is not retried, because it would probably time out again. Not here: a step without any judged
rollout (`groups.check_judged`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import msgspec
import trio

from rollouts.errors import InferenceError, RolloutsError, RunError, leaves_of
from rollouts.inference.base import CanAbort, GenerateRequest, Generation, InferenceBackend
from rollouts.inference.suspend import SuspendableEngine, SuspendedEpisode
from rollouts.types import Episode, Sample, Status, Task

ABORT_SECONDS = 30.0  # after this time, requests of aborted replies are cancelled, and their tokens are lost


class Job(NamedTuple):
    """One episode to play.

    Attributes:
        task: its task
        order: its place in the run, as (group, rollout)
        suspended: the episode's state from a checkpoint; None: begin with the first turn
    """

    task: Task
    order: tuple[int, int]
    suspended: SuspendedEpisode | None = None


Play = Callable[[Job, str, SuspendableEngine], Awaitable[Any]]
"""Plays one job in this session of the engine, and returns its Episode. A failed episode is a result too; an exception
ends the run."""

OnEnd = Callable[[Job, Any], None]
"""Called with the result of `play`, in trio's thread. Not called if the job is retried."""


class _Turn(NamedTuple):
    """A job or a suspended episode that may play now, with its open session."""

    entry: Job | SuspendableEngine
    session: str


@dataclass(eq=False, repr=False)
class EpisodePool:
    """Plays jobs. Enter the pool, then call `open`; until then no job plays.

    While it `is_closed`, no episode begins and no new reply starts, but unfinished replies continue. Leaving the pool
    cancels the tasks of its `nursery` and all unfinished episodes; each episode closes its environment, under its own
    deadline. A RolloutsError from `play` cancels everything, and leaving the pool raises it (the first one, if there
    are several).

    Args:
        play: plays one job
        inference: the engine
        concurrency: how many episodes play at once
        on_end: called with each result
        failures: decides which episodes are retried, and when too many have failed
    """

    play: Play
    inference: InferenceBackend
    concurrency: int
    on_end: OnEnd
    failures: Failures
    is_closed: bool = field(default=True, init=False)
    _queue: list[Job | SuspendableEngine] = field(default_factory=list, init=False)
    _engines: dict[tuple[int, ...], SuspendableEngine] = field(default_factory=dict, init=False)
    _turns: dict[SuspendableEngine, trio.Event] = field(default_factory=dict, init=False)  # waiting at the gate
    # While the reward of an episode runs, its place is free for the next one. Key: the engine of the first.
    _successors: dict[SuspendableEngine, _Turn] = field(default_factory=dict, init=False)
    _playing: int = field(default=0, init=False)
    _idle: trio.Event = field(default_factory=trio.Event, init=False)
    _manager: AbstractAsyncContextManager[trio.Nursery] = field(default_factory=trio.open_nursery, init=False)
    nursery: trio.Nursery = field(init=False)

    async def __aenter__(self) -> EpisodePool:
        assert self.concurrency > 0, self.concurrency
        self.nursery = await self._manager.__aenter__()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.is_closed = True
        self.nursery.cancel_scope.cancel()
        try:
            await self._manager.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            leaves = list(leaves_of(group))
            if leaves == [error]:
                return  # the block's own exception, which continues
            if all(isinstance(leaf, RolloutsError) for leaf in leaves):
                raise leaves[0] from None
            raise  # Ctrl-C or a bug must not be replaced by a known error

    @property
    def suspended(self) -> dict[tuple[int, ...], SuspendedEpisode]:
        """Suspended episodes that a checkpoint can store, by (group, rollout)."""
        return {order: engine.suspended for order, engine in self._engines.items() if engine.suspended is not None}

    @property
    def waiting(self) -> dict[tuple[int, ...], tuple[GenerateRequest, Generation]]:
        """The replies that are suspended with at least one token, by (group, rollout): the request, and the reply so
        far.
        """
        waits = {order: engine.waits for order, engine in self._engines.items() if engine.waits is not None}
        return {order: (request, reply) for order, (request, reply) in waits.items() if reply.tokens}

    def add(self, jobs: Iterable[Job]) -> None:
        """Add jobs to the end of the queue."""
        self._queue.extend(jobs)
        self._fill()

    def open(self) -> None:
        """Open the gate. Waiting episodes and new jobs play in their order."""
        self.is_closed = False
        self._queue.sort(key=lambda entry: entry.order)
        self._fill()

    async def pause(self) -> None:
        """Close the pool, and make the engine return unfinished replies.

        If the engine cannot abort, wait until the replies are finished; the deadlines of the episodes limit this wait.
        If an engine aborts, but does not return a reply within `ABORT_SECONDS`, the tokens of this reply are lost.
        """
        self.is_closed = True
        for turn in self._successors.values():  # these turns have not begun: the predecessor's reward is still running
            self.inference.close_session(turn.session)
            self._queue.append(turn.entry)
        self._successors.clear()
        generating = [engine for engine in self._engines.values() if not engine.idle.is_set()]
        if not generating or not self.inference.capabilities.aborts:
            await trio.lowlevel.checkpoint()
            for engine in generating:
                await engine.idle.wait()
            return
        for engine in generating:
            engine.is_aborting = True
        with trio.move_on_after(ABORT_SECONDS):
            async with trio.open_nursery() as nursery:
                for engine in generating:
                    nursery.start_soon(self._abort, engine)
            for event in [engine.idle for engine in generating]:
                await event.wait()
        for engine in generating:
            if not engine.idle.is_set():
                engine.cancel_request()

    async def _abort(self, engine: SuspendableEngine) -> None:
        try:
            await cast(CanAbort, self.inference).abort(engine.session)
        except InferenceError:  # the tokens of this reply are lost; the episode samples it again
            engine.cancel_request()

    async def finished(self) -> None:
        """Wait until all jobs are finished."""
        while self._queue or self._engines or self._playing:
            self._idle = trio.Event()
            await self._idle.wait()

    # --- the turn gate ------------------------------------------------------------------------------------------------

    async def wait(self, engine: SuspendableEngine) -> None:
        """Wait until this episode may play."""
        if engine.has_turn:
            engine.has_turn = False
            self._playing -= 1
        event = self._turns[engine] = trio.Event()
        self._queue.append(engine)
        self._queue.sort(key=lambda entry: entry.order)
        self._fill()
        try:
            await event.wait()
        finally:
            del self._turns[engine]
            if not event.is_set() and engine in self._queue:
                self._queue.remove(engine)

    def leave(self, engine: SuspendableEngine) -> None:
        """Open the session of the successor, before the episode closes its own."""
        if engine.has_turn and (turn := self._next()) is not None:
            self._successors[engine] = turn

    # --- turns --------------------------------------------------------------------------------------------------------

    def _next(self) -> _Turn | None:
        if self.is_closed or not self._queue:
            return None
        entry = self._queue.pop(0)
        return _Turn(entry, self.inference.open_session(entry.order))

    def _fill(self) -> None:
        """Start turns up to the limit. Every session is open before any of these tasks runs."""
        while self._playing < self.concurrency and (turn := self._next()) is not None:
            self._start(turn)

    def _start(self, turn: _Turn) -> None:
        entry, session = turn
        if isinstance(entry, Job):
            self._playing += 1
            self.nursery.start_soon(self._work, entry, session)
        elif entry in self._turns:
            self._playing += 1
            entry.session, entry.has_turn = session, True
            self._turns[entry].set()
        else:  # the turn was cancelled while its predecessor's reward ran
            self.inference.close_session(session)
            self._fill()

    async def _work(self, job: Job, session: str) -> None:
        engine = self._engines[job.order] = SuspendableEngine(self.inference, self, job.order, session, job.suspended)
        try:
            seconds = self.failures.pause_before(job.order)
            if seconds and not self.inference.capabilities.in_process:  # an engine in this process needs no recovery
                await trio.sleep(seconds)
            outcome = await self.play(job, session, engine)
            engine.close_session(session)
            kept = self.failures.settle(outcome, job.order)
        except BaseException:
            self.inference.close_session(engine.session)
            if engine in self._successors:
                self.inference.close_session(self._successors.pop(engine).session)
            raise
        finally:
            del self._engines[job.order]
        if kept is None:  # a retry, from the first turn
            self._queue.insert(0, job._replace(suspended=None))
        else:
            self.on_end(job, kept)
        if engine.has_turn:
            self._playing -= 1
            if engine in self._successors:
                self._start(self._successors.pop(engine))
            else:
                self._fill()
        self._idle.set()


async def run_episodes(
    jobs: Sequence[Job],
    play: Play,
    inference: InferenceBackend,
    *,
    concurrency: int = 256,
    failures: Failures | None = None,
    on_end: OnEnd | None = None,
) -> list[Episode]:
    """Play every job. The results have the order of `jobs`.

    If cancelled, all episodes end (each episode closes its environment, under its own deadline) and nothing is
    returned. A RolloutsError from `play` also ends them, and is raised (the first one, if there are several).

    Args:
        concurrency: how many episodes play at once
        failures: as for EpisodePool; None: an episode is never retried, and failures do not end the run
        on_end: called with each finished job and its episode
    """
    episodes: dict[tuple[int, int], Episode] = {}

    def keep(job: Job, episode: Episode) -> None:
        episodes[job.order] = episode
        if on_end is not None:
            on_end(job, episode)

    failures = failures or Failures(FailurePolicy(retries=0))
    async with EpisodePool(play, inference, concurrency, keep, failures) as pool:
        pool.open()
        pool.add(jobs)
        await pool.finished()
    assert len(episodes) == len(jobs), f"{len(episodes)} episodes for {len(jobs)} jobs"
    return [episodes[job.order] for job in jobs]


# --- failures ---------------------------------------------------------------------------------------------------------


WINDOW = 200  # if the limit is a fraction, it is a fraction of this many recent episodes
REASONS_MAX = 1000  # how many different reasons are counted; a message may contain addresses and numbers
REASON_CHARACTERS = 300
REASONS_SHOWN = 3


class FailurePolicy(NamedTuple):
    """Settings for failed episodes.

    Args:
        retries: how often one episode is retried
        max_failures: stop the run after this many failed episodes (int), or when more than this fraction of the last
            `WINDOW` episodes failed (0 < float < 1). None: no limit
        pause_seconds: wait before the retry after an engine failure; doubles each time
    """

    retries: int = 1
    max_failures: int | float | None = None
    pause_seconds: float = 1.0


def is_failure(status: Status) -> bool:
    """Whether this status is an infrastructure failure other than an aborted episode."""
    return status.is_infrastructure and status is not Status.ABORTED


class FailureBudget:
    """Counts failed episodes and their reasons, and ends the run if there are too many. A process needs only one."""

    def __init__(self, max_failures: int | float | None = None) -> None:
        self.settled = 0
        self.by_status: Counter[str] = Counter()
        self._max = max_failures
        self._reasons: Counter[str] = Counter()
        self._last: deque[bool] = deque(maxlen=WINDOW)

    def add(self, status: Status, error: str | None) -> None:
        """Count a rollout that will not be retried. Raises RunError if there are too many failures."""
        failed = is_failure(status)
        self.settled += 1
        self._last.append(failed)
        if not failed:
            return
        self.by_status[status.value] += 1
        lines = (error or "").splitlines() or ["no reason given"]
        reason = f"{status.value}: {lines[0][:REASON_CHARACTERS]}"
        self._reasons[reason if reason in self._reasons or len(self._reasons) < REASONS_MAX else "other reasons"] += 1
        total, of_last, limit = self.by_status.total(), sum(self._last), self._max
        if isinstance(limit, int) and total >= limit:
            share, allowed = f"{total} of {self.settled}", f"{limit}"
        elif isinstance(limit, float) and of_last > limit * WINDOW:
            share, allowed = f"{of_last} of the last {len(self._last)}", f"{limit:g} of the last {WINDOW}"
        else:
            return
        statuses = ", ".join(f"{status} {count}" for status, count in self.by_status.most_common())
        commonest = self._reasons.most_common(REASONS_SHOWN)
        words = f"{share} rollouts failed, and --max-failures is {allowed}".replace(" 1 rollouts", " 1 rollout")
        lines = [words, f"by status: {statuses}"]
        lines += [f"  {count} x {reason}" for reason, count in commonest]
        rest = total - sum(count for _, count in commonest)
        raise RunError("\n".join([*lines, f"  {rest} x other reasons"] if rest else lines))


class Failures:
    """For each failed episode of one pool: retry it, or keep and count it.

    `retried` is the number of retries so far. Several objects may share a `budget` (`beside`).
    """

    def __init__(self, policy: FailurePolicy | None = None, budget: FailureBudget | None = None) -> None:
        self.policy = policy or FailurePolicy()
        self.budget = budget or FailureBudget(self.policy.max_failures)
        self._attempts: dict[tuple[int, ...], list[Status]] = {}  # earlier failures of each unfinished episode
        self.retried = 0

    def beside(self) -> Failures:
        """A new object for other episodes (of an evaluation), which may have the same orders. It shares the budget."""
        return Failures(self.policy, self.budget)

    def settle(self, outcome: Episode | Sequence[Sample], order: tuple[int, ...]) -> Any:
        """Choose whether to keep the result of a job. Returns the result to keep, or None to play the job again.

        `outcome` is an episode, or the samples of a `generate_fn`, which are retried only if all of them failed. A
        retry has the same order and seed. The kept result has the number of retries in its metrics or metadata, as
        `retried` and `retried/<status>`. Raises RunError if there are too many failures.
        """
        if isinstance(outcome, Episode):
            results, may_retry = [(outcome.status, outcome.trajectory.error)], outcome.may_retry
        else:
            results = [(sample.status, sample.metadata.get("error")) for sample in outcome]
            may_retry = all(status is not Status.TIMEOUT for status, _ in results)
        earlier = self._attempts.setdefault(order, [])
        if may_retry and all(is_failure(status) for status, _ in results) and len(earlier) < self.policy.retries:
            earlier.append(results[0][0])
            self.retried += 1
            return None
        del self._attempts[order]
        for status, error in results:
            self.budget.add(status, error)
        if not earlier:
            return outcome
        counts = {"retried": float(len(earlier))}
        counts |= {f"retried/{status.value}": float(count) for status, count in Counter(earlier).items()}
        if not isinstance(outcome, Episode):
            return [replace(sample, metadata=sample.metadata | counts) for sample in outcome]
        trajectory = msgspec.structs.replace(outcome.trajectory, metrics=outcome.trajectory.metrics | counts)
        trajectories = [trajectory if each is outcome.trajectory else each for each in outcome.trajectories]
        return outcome._replace(trajectories=trajectories, metrics=outcome.metrics | counts)

    def pause_before(self, order: tuple[int, ...]) -> float:
        """Seconds to wait before this episode is played. A server that failed needs time to recover."""
        earlier = self._attempts.get(order)
        if not earlier or earlier[-1] is not Status.INFERENCE_ERROR:
            return 0.0
        return self.policy.pause_seconds * 2.0 ** (len(earlier) - 1)
