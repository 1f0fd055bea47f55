"""EpisodePool: episodes side by side, at most so many of them playing; they can be paused in mid-reply and resumed.

    episodes = await run_episodes(jobs, play, inference, concurrency=64)

The set of playing episodes decides how an in-process engine forms its batches, so it may depend on counts only, never
on the order in which trio runs tasks or on how long a reward takes: sessions are opened before the tasks that use them
run, and where an episode closes its session, its successor's is opened first.

While the pool is shut no reply is sampled: episodes that ask for one wait at the gate, in memory, with environment and
conversation; they do not count as playing. Left out: what is played, and when the pool is shut (`manager`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import trio

from rollouts.errors import InferenceError, RolloutsError, leaves_of
from rollouts.inference.base import CanAbort, InferenceBackend
from rollouts.inference.suspend import SuspendableEngine, SuspendedEpisode
from rollouts.training.rollout_gen.failures import FailurePolicy, Failures
from rollouts.types import Episode, Task

ABORT_SECONDS = 30.0  # an engine that was asked to stop has this long to give back what it has


class Job(NamedTuple):
    """One episode to play: the task, and its place (group, rollout) in the run. `suspended` is its saved state."""

    task: Task
    order: tuple[int, int]
    suspended: SuspendedEpisode | None = None


Play = Callable[[Job, str, SuspendableEngine], Awaitable[Any]]
"""Plays one job in the named session of the engine; gives its Episode. It returns failed episodes as data; what it
raises ends the run."""

OnEnd = Callable[[Job, Any], None]
"""Called at once with what `play` returned, in trio's thread; not with what is played again."""


class _Turn(NamedTuple):
    """Whose turn it is to play, with a session that is open already."""

    who: Job | SuspendableEngine
    session: str


@dataclass(eq=False, repr=False)
class EpisodePool:
    """Plays jobs; enter it first. It is shut until `open` is called.

    No episode begins while it `is_closed`, and none asks for a reply; replies that are under way continue. What runs in
    its `nursery` ends with it. Leaving it cancels what still plays (each environment is closed, under its own
    deadline). A RolloutsError that `play` raises ends everything and is raised as it is where the pool is left; of
    several the first one. `failures` says which episodes are played again, and when too many have failed.
    """

    play: Play
    inference: InferenceBackend
    concurrency: int
    on_end: OnEnd
    failures: Failures
    is_closed: bool = field(default=True, init=False)
    _queue: list[Job | SuspendableEngine] = field(default_factory=list, init=False)
    _engines: dict[tuple[int, ...], SuspendableEngine] = field(default_factory=dict, init=False)
    _turns: dict[SuspendableEngine, trio.Event] = field(default_factory=dict, init=False)  # of those at the gate
    _successors: dict[SuspendableEngine, _Turn] = field(
        default_factory=dict, init=False
    )  # of those whose reward is being asked
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
                return  # raised in the block, as it is
            if all(isinstance(leaf, RolloutsError) for leaf in leaves):
                raise leaves[0] from None
            raise  # Ctrl-C, or a bug: neither may hide behind an error that is known

    @property
    def suspended(self) -> dict[tuple[int, ...], SuspendedEpisode]:
        """What a checkpoint can keep of those that wait at the gate, by (group, rollout)."""
        return {order: engine.suspended for order, engine in self._engines.items() if engine.suspended is not None}

    def add(self, jobs: Iterable[Job]) -> None:
        """More to play, after what waits already."""
        self._queue.extend(jobs)
        self._fill()

    def open(self) -> None:
        """Let them play: those at the gate and those that have not begun, by their order."""
        self.is_closed = False
        self._queue.sort(key=lambda who: who.order)
        self._fill()

    async def pause(self) -> None:
        """Shut, and have the engine give back the replies that are under way.

        An engine that cannot abort is waited for until it has finished them (the episodes' deadlines bound that); one
        that is asked to, and does not, loses what it has of them.
        """
        self.is_closed = True
        for turn in self._successors.values():  # they have not begun: the reward of their predecessor is being asked
            self.inference.close_session(turn.session)
            self._queue.append(turn.who)
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
        except InferenceError:  # what it has of this reply is lost; the episode resumes before it
            engine.cancel_request()

    async def finished(self) -> None:
        """Until everything that was added is over."""
        while self._queue or self._engines or self._playing:
            self._idle = trio.Event()
            await self._idle.wait()

    # --- the turn gate ------------------------------------------------------------------------------------------------

    async def wait(self, engine: SuspendableEngine) -> None:
        """Until it is this engine's turn."""
        if engine.has_turn:
            engine.has_turn = False
            self._playing -= 1
        event = self._turns[engine] = trio.Event()
        self._queue.append(engine)
        self._queue.sort(key=lambda who: who.order)
        self._fill()
        try:
            await event.wait()
        finally:
            del self._turns[engine]
            if not event.is_set() and engine in self._queue:
                self._queue.remove(engine)

    def leave(self, engine: SuspendableEngine) -> None:
        """Its successor's session is opened before its own is closed."""
        if engine.has_turn and (turn := self._next()) is not None:
            self._successors[engine] = turn

    # --- turns --------------------------------------------------------------------------------------------------------

    def _next(self) -> _Turn | None:
        if self.is_closed or not self._queue:
            return None
        who = self._queue.pop(0)
        return _Turn(who, self.inference.open_session(who.order))

    def _fill(self) -> None:
        """Give turns while there are any; every session is open before the first of these tasks runs."""
        while self._playing < self.concurrency and (turn := self._next()) is not None:
            self._start(turn)

    def _start(self, turn: _Turn) -> None:
        who, session = turn
        if isinstance(who, Job):
            self._playing += 1
            self.nursery.start_soon(self._work, who, session)
        elif who in self._turns:
            self._playing += 1
            who.session, who.has_turn = session, True
            self._turns[who].set()
        else:  # it was cancelled while its predecessor's reward was asked
            self.inference.close_session(session)
            self._fill()

    async def _work(self, job: Job, session: str) -> None:
        engine = self._engines[job.order] = SuspendableEngine(self.inference, self, job.order, session, job.suspended)
        try:
            seconds = self.failures.pause_before(job.order)
            if seconds and not self.inference.capabilities.in_process:  # an engine in this process cannot be away
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
        if kept is None:  # it is played again, from its first turn
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
    """Play every job; the result has the order of `jobs`. `failures` and `on_end` as in the pool
    (None: no episode is played again, and none fails the run).

    Cancellation ends all episodes (each closes its environment under its own deadline) and returns nothing. A
    RolloutsError that `play` raises ends them too, and is raised as it is; several give the first one.
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
