"""EpisodePool: episodes side by side, at most so many of them playing; they can be stopped in mid-reply and go on.

The set of playing episodes decides how an in-process engine forms its batches, so it may depend on counts only, never
on the order in which trio runs tasks or on how long a reward takes: sessions are opened before the tasks that use them
run, and where an episode closes its session, its successor's is opened first.

While the pool is shut nobody speaks: those that ask for a reply wait at the gate, in memory, with their environment and
conversation; they do not count as playing. Left out: what is played, and when the pool is shut (`manager`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, NamedTuple, cast

import trio

from rollouts.errors import InferenceError, RolloutsError
from rollouts.inference.base import CanAbort, InferenceBackend
from rollouts.inference.carried import HeldEpisode, Seat
from rollouts.training.rollout_gen.failures import FailurePolicy, Failures
from rollouts.types import Task

__all__ = ["EpisodePool", "Job", "Play", "first_error"]

ABORT_SECONDS = 30.0  # an engine that was told to stop has this long to give back what it has


class Job(NamedTuple):
    """One episode to play: the task, and its place (group, rollout) in the run. `held` is what an earlier process left
    of it.
    """

    task: Task
    order: tuple[int, int]
    held: HeldEpisode | None = None


Play = Callable[[Job, str, InferenceBackend], Awaitable[Any]]
"""Plays one job in the named session of the engine; gives its Episode. It returns failed episodes as data; what it
raises ends the run."""

OnEnd = Callable[[Job, Any], None]
"""Told what `play` returned, at once, in trio's thread; not of what is played again."""


class _Turn(NamedTuple):
    """Whose turn it is to play, with a session that is open already."""

    who: Job | Seat
    session: str


class EpisodePool:
    """Plays jobs; enter it first. It is shut until `open` is called.

    Leaving it cancels what still plays (each environment is closed, under its own deadline). A RolloutsError that
    `play` raises ends everything and is raised as it is where the pool is left; of several the first one. `failures`
    says which episodes are played again, and when too many have failed (None: none, and never).
    """

    def __init__(
        self,
        play: Play,
        inference: InferenceBackend,
        *,
        concurrency: int,
        on_end: OnEnd,
        failures: Failures | None = None,
    ) -> None:
        assert concurrency > 0, concurrency
        self.is_shut = True
        self._failures = failures or Failures(FailurePolicy(retries=0))
        self._play = self._failures.patient(play)
        self._inference = inference
        self._concurrency = concurrency
        self._on_end = on_end
        self._queue: list[Job | Seat] = []
        self._turns: dict[Seat, trio.Event] = {}  # of those at the gate
        self._successors: dict[Seat, _Turn | None] = {}  # of those that have left, while their reward is asked
        self._seats: dict[tuple[int, ...], Seat] = {}
        self._playing = 0
        self._idle = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._manager: AbstractAsyncContextManager[trio.Nursery] | None = None

    async def __aenter__(self) -> EpisodePool:
        self._manager = trio.open_nursery()
        self._nursery = await self._manager.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        assert self._manager is not None and self._nursery is not None, "the pool was entered"
        self.is_shut = True
        self._nursery.cancel_scope.cancel()
        try:
            return bool(await self._manager.__aexit__(kind, error, traceback))
        except BaseExceptionGroup as group:
            if _only_leaf(group) is error is not None:
                return False
            _, others = group.split(RolloutsError)
            if others is not None:
                raise  # Ctrl-C, or a bug: neither may hide behind an error that is known
            raise first_error(group) from None
        finally:
            self._nursery = None

    @property
    def held(self) -> dict[tuple[int, ...], HeldEpisode]:
        """What a checkpoint can keep of those that wait at the gate, by (group, rollout)."""
        return {order: seat.held for order, seat in self._seats.items() if seat.held is not None}

    def beside(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run this too while the pool is entered; what it raises ends the pool."""
        assert self._nursery is not None, "enter the pool first"
        self._nursery.start_soon(task)

    def add(self, jobs: Iterable[Job]) -> None:
        """More to play, after what waits already."""
        self._queue.extend(jobs)
        self._fill()

    def open(self) -> None:
        """Let them play: those at the gate and those that have not begun, by their order."""
        self.is_shut = False
        self._queue.sort(key=lambda who: who.order)
        self._fill()

    def shut(self) -> None:
        """Nobody begins, and nobody speaks, from now on; replies that are under way go on."""
        self.is_shut = True

    async def pause(self) -> None:
        """Shut, and have the engine give back the replies that are under way.

        An engine that cannot abort is waited for until it has finished them (the episodes' deadlines bound that); one
        that is told to, and does not, loses what it has of them.
        """
        self.shut()
        for seat, turn in self._successors.items():
            if turn is not None:  # it has not begun: its predecessor's reward is being asked
                self._inference.close_session(turn.session)
                self._successors[seat] = None
                self._queue.append(turn.who)
        stopped = [seat for seat in self._seats.values() if not seat.silent.is_set()]
        if not stopped or not isinstance(self._inference, CanAbort):
            await trio.lowlevel.checkpoint()
            for seat in stopped:
                await seat.silent.wait()
            return
        for seat in stopped:
            seat.is_stopping = True
        with trio.move_on_after(ABORT_SECONDS):
            async with trio.open_nursery() as nursery:
                for seat in stopped:
                    nursery.start_soon(self._abort, seat)
            for event in [seat.silent for seat in stopped]:
                await event.wait()
        for seat in stopped:
            if not seat.silent.is_set():
                seat.cut()

    async def _abort(self, seat: Seat) -> None:
        try:
            await cast(CanAbort, self._inference).abort(seat.session)
        except InferenceError:  # what it has of this reply is lost; the episode goes on from before it
            seat.cut()

    async def finished(self) -> None:
        """Until everything that was added is over."""
        while self._queue or self._seats or self._playing:
            self._idle = trio.Event()
            await self._idle.wait()

    # --- the gate of its seats ----------------------------------------------------------------------------------------

    async def wait(self, seat: Seat) -> None:
        """Until it is this seat's turn."""
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
        """Its successor's session is opened before its own is closed."""
        if seat.may_speak:
            self._successors[seat] = self._next()

    # --- turns --------------------------------------------------------------------------------------------------------

    def _next(self) -> _Turn | None:
        if self.is_shut or not self._queue:
            return None
        who = self._queue.pop(0)
        return _Turn(who, self._inference.open_session(who.order))

    def _fill(self) -> None:
        """Give turns while there are any; every session is open before the first of these tasks runs."""
        while self._playing < self._concurrency and (turn := self._next()) is not None:
            self._playing += 1
            self._start(turn)

    def _start(self, turn: _Turn) -> None:
        if isinstance(turn.who, Job):
            assert self._nursery is not None, "enter the pool first"
            self._nursery.start_soon(self._work, turn.who, turn.session)
        elif turn.who in self._turns:
            turn.who.session, turn.who.may_speak = turn.session, True
            self._turns[turn.who].set()
        else:  # it was cancelled while its predecessor's reward was asked
            self._inference.close_session(turn.session)
            self._playing -= 1
            self._fill()

    async def _work(self, job: Job, session: str) -> None:
        seat = self._seats[job.order] = Seat(self._inference, self, job.order, session, job.held)
        try:
            outcome = await self._play(job, session, cast(InferenceBackend, seat))
            seat.close_session(session)
            kept = self._failures.settle(outcome, job.order)
        except BaseException:
            self._inference.close_session(seat.session)
            successor = self._successors.pop(seat, None)
            if successor is not None:
                self._inference.close_session(successor.session)
            raise
        finally:
            del self._seats[job.order]
        if kept is None:  # it is played again, from its first turn
            self._queue.insert(0, job._replace(held=None))
        else:
            self._on_end(job, kept)
        if seat.may_speak:
            self._playing -= 1
            successor = self._successors.pop(seat)
            if successor is not None:
                self._playing += 1
                self._start(successor)
            else:
                self._fill()
        self._idle.set()


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain exception of a group: many episodes may fail of the same cause, the user needs it once."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _only_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """The one plain exception of a group; None where there are several."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        if len(error.exceptions) != 1:
            return None
        error = error.exceptions[0]
    return error
