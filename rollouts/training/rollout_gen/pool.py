"""EpisodePool: plays episodes concurrently, up to a limit. It can suspend them in mid-reply, and resume them.

    episodes = await run_episodes(jobs, play, inference, concurrency=64)

The episodes that are playing determine the batches of an engine in this process. So they may depend on counts only, and
not on the order in which trio runs tasks, or on the time that a reward takes. Therefore sessions are opened before
their tasks run. When an episode closes its session, the session of its successor is opened first.

While the pool is shut, no new reply begins. Episodes that need one wait at the gate, in memory, and do not count as
playing. Not here: what is played, and when the pool is shut (`manager`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import trio

from rollouts.errors import InferenceError, RolloutsError, leaves_of
from rollouts.inference.base import CanAbort, InferenceBackend
from rollouts.inference.carried import HeldEpisode, Seat
from rollouts.training.rollout_gen.failures import FailurePolicy, Failures
from rollouts.types import Episode, Task

ABORT_SECONDS = 30.0  # how long an engine may take to return the replies that it aborts


class Job(NamedTuple):
    """One episode to play.

    Attributes:
        task: its task
        order: its place in the run, as (group, rollout)
        held: the suspended episode, from a checkpoint; None: begin with the first turn
    """

    task: Task
    order: tuple[int, int]
    held: HeldEpisode | None = None


Play = Callable[[Job, str, Seat], Awaitable[Any]]
"""Plays one job in this session of the engine, and returns its Episode. A failed episode is a result too; an exception
ends the run."""

OnEnd = Callable[[Job, Any], None]
"""Called with the result of `play`, in trio's thread. Not called if the job is retried."""


class _Turn(NamedTuple):
    """A job or a suspended episode that may play now, and its open session."""

    who: Job | Seat
    session: str


@dataclass(eq=False, repr=False)
class EpisodePool:
    """Plays jobs. Enter it first, then call `open`; it is shut before.

    While it `is_shut`, no episode begins and no new reply starts, but unfinished replies continue. Leaving it cancels
    the tasks of its `nursery` and all unfinished episodes; each closes its environment, under its own deadline. A
    RolloutsError from `play` cancels everything, and leaving the pool raises it (the first one, if there are several).

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
    is_shut: bool = field(default=True, init=False)
    _queue: list[Job | Seat] = field(default_factory=list, init=False)
    _seats: dict[tuple[int, ...], Seat] = field(default_factory=dict, init=False)
    _turns: dict[Seat, trio.Event] = field(default_factory=dict, init=False)  # those that wait at the gate
    _successors: dict[Seat, _Turn] = field(default_factory=dict, init=False)  # by the episode whose reward is running
    _playing: int = field(default=0, init=False)
    _idle: trio.Event = field(default_factory=trio.Event, init=False)
    _manager: AbstractAsyncContextManager[trio.Nursery] = field(default_factory=trio.open_nursery, init=False)
    nursery: trio.Nursery = field(init=False)

    async def __aenter__(self) -> EpisodePool:
        assert self.concurrency > 0, self.concurrency
        self.nursery = await self._manager.__aenter__()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.is_shut = True
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
    def held(self) -> dict[tuple[int, ...], HeldEpisode]:
        """Suspended episodes that a checkpoint can store, by (group, rollout)."""
        return {order: seat.held for order, seat in self._seats.items() if seat.held is not None}

    def add(self, jobs: Iterable[Job]) -> None:
        """Add jobs to the end of the queue."""
        self._queue.extend(jobs)
        self._fill()

    def open(self) -> None:
        """Open the gate. Waiting episodes and new jobs play in their order."""
        self.is_shut = False
        self._queue.sort(key=lambda who: who.order)
        self._fill()

    async def pause(self) -> None:
        """Shut the pool, and make the engine return unfinished replies.

        If the engine cannot abort, wait until the replies are finished; the deadlines of the episodes limit this. If an
        engine does not return a reply in time, the tokens of this reply are lost.
        """
        self.is_shut = True
        for turn in self._successors.values():  # they have not begun: their predecessor's reward is still running
            self.inference.close_session(turn.session)
            self._queue.append(turn.who)
        self._successors.clear()
        speaking = [seat for seat in self._seats.values() if not seat.silent.is_set()]
        if not speaking or not self.inference.capabilities.aborts:
            await trio.lowlevel.checkpoint()
            for seat in speaking:
                await seat.silent.wait()
            return
        for seat in speaking:
            seat.is_stopping = True
        with trio.move_on_after(ABORT_SECONDS):
            async with trio.open_nursery() as nursery:
                for seat in speaking:
                    nursery.start_soon(self._abort, seat)
            for event in [seat.silent for seat in speaking]:
                await event.wait()
        for seat in speaking:
            if not seat.silent.is_set():
                seat.cut()

    async def _abort(self, seat: Seat) -> None:
        try:
            await cast(CanAbort, self.inference).abort(seat.session)
        except InferenceError:  # the tokens of this reply are lost; the episode continues before it
            seat.cut()

    async def finished(self) -> None:
        """Wait until all jobs are finished."""
        while self._queue or self._seats or self._playing:
            self._idle = trio.Event()
            await self._idle.wait()

    # --- the gate -----------------------------------------------------------------------------------------------------

    async def wait(self, seat: Seat) -> None:
        """Wait until this episode may play."""
        if seat.may_speak:
            seat.may_speak = False
            self._playing -= 1
        event = self._turns[seat] = trio.Event()
        self._queue.append(seat)
        self._queue.sort(key=lambda who: who.order)
        self._fill()
        try:
            await event.wait()
        finally:
            del self._turns[seat]
            if not event.is_set() and seat in self._queue:
                self._queue.remove(seat)

    def leave(self, seat: Seat) -> None:
        """Open the session of the successor, before the episode closes its own."""
        if seat.may_speak and (turn := self._next()) is not None:
            self._successors[seat] = turn

    # --- turns --------------------------------------------------------------------------------------------------------

    def _next(self) -> _Turn | None:
        if self.is_shut or not self._queue:
            return None
        who = self._queue.pop(0)
        return _Turn(who, self.inference.open_session(who.order))

    def _fill(self) -> None:
        """Start turns up to the limit. Every session is open before any of these tasks runs."""
        while self._playing < self.concurrency and (turn := self._next()) is not None:
            self._start(turn)

    def _start(self, turn: _Turn) -> None:
        who, session = turn
        if isinstance(who, Job):
            self._playing += 1
            self.nursery.start_soon(self._work, who, session)
        elif who in self._turns:
            self._playing += 1
            who.session, who.may_speak = session, True
            self._turns[who].set()
        else:  # it was cancelled while its predecessor's reward ran
            self.inference.close_session(session)
            self._fill()

    async def _work(self, job: Job, session: str) -> None:
        seat = self._seats[job.order] = Seat(self.inference, self, job.order, session, job.held)
        try:
            seconds = self.failures.pause_before(job.order)
            if seconds and not self.inference.capabilities.in_process:  # an engine in this process needs no recovery
                await trio.sleep(seconds)
            outcome = await self.play(job, session, seat)
            seat.close_session(session)
            kept = self.failures.settle(outcome, job.order)
        except BaseException:
            self.inference.close_session(seat.session)
            if seat in self._successors:
                self.inference.close_session(self._successors.pop(seat).session)
            raise
        finally:
            del self._seats[job.order]
        if kept is None:  # a retry, from the first turn
            self._queue.insert(0, job._replace(held=None))
        else:
            self.on_end(job, kept)
        if seat.may_speak:
            self._playing -= 1
            if seat in self._successors:
                self._start(self._successors.pop(seat))
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

    If cancelled, all episodes end (each closes its environment, under its own deadline) and nothing is returned. A
    RolloutsError from `play` also ends them, and is raised (the first one, if there are several).

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
