"""Many episodes at once, results in order, at most so many alive.

The set of live episodes decides how an in-process engine forms its batches, so it may depend on counts only, never on
the order in which trio runs tasks or on how long a reward takes: sessions are opened here, before the tasks that use
them run, and where an episode closes its session, its successor's is opened first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, cast

import trio

from rollouts.agent import Episode
from rollouts.errors import RolloutsError
from rollouts.inference.base import InferenceBackend
from rollouts.types import Task

__all__ = ["Job", "Play", "first_error", "run_episodes"]


class Job(NamedTuple):
    """One episode to play: the task, and its place (group, rollout) in the run."""

    task: Task
    order: tuple[int, int]


Play = Callable[[Job, str, InferenceBackend], Awaitable[Episode]]
"""Plays one job in the named session of the engine. It returns failed episodes as data; what it raises ends the run."""


class _Announced(NamedTuple):
    """A job whose session is open, so that the engine waits for it."""

    place: int
    job: Job
    session: str


class _EngineOfOne:
    """The engine as one episode sees it: when its session is closed, its successor's is open already."""

    def __init__(self, inference: InferenceBackend, announce: Callable[[], _Announced | None]) -> None:
        self._inference = inference
        self._announce = announce
        self._announced = False
        self.successor: _Announced | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inference, name)

    def close_session(self, session: str) -> None:
        """Announce the successor, once; then close."""
        if not self._announced:
            self._announced = True
            self.successor = self._announce()
        self._inference.close_session(session)


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain exception of a group: many episodes may fail of the same cause, the user needs it once."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def run_episodes(
    jobs: Sequence[Job], play: Play, inference: InferenceBackend, *, concurrency: int = 256
) -> list[Episode]:
    """Play every job; the result has the order of `jobs`.

    Cancellation ends all episodes (each closes its environment under its own deadline) and returns nothing. A
    RolloutsError that `play` raises ends them too, and is raised as it is; several give the first one.
    """
    assert concurrency > 0, concurrency
    episodes: dict[int, Episode] = {}
    upcoming = iter(enumerate(jobs))

    def announce() -> _Announced | None:
        following = next(upcoming, None)
        return None if following is None else _Announced(*following, inference.open_session(following[1].order))

    async def work(current: _Announced | None) -> None:
        while current is not None:
            engine = _EngineOfOne(inference, announce)
            try:
                episodes[current.place] = await play(current.job, current.session, cast(InferenceBackend, engine))
                engine.close_session(current.session)
            except BaseException:
                for announced in (current, engine.successor):
                    if announced is not None:
                        inference.close_session(announced.session)
                raise
            current = engine.successor

    first = [announce() for _ in range(min(concurrency, len(jobs)))]
    try:
        async with trio.open_nursery() as nursery:
            for job in first:
                nursery.start_soon(work, job)
    except BaseExceptionGroup as group:
        _, others = group.split(RolloutsError)
        if others is not None:
            raise  # Ctrl-C, or a bug: neither may hide behind an error that is known
        raise first_error(group) from None
    assert len(episodes) == len(jobs), f"{len(episodes)} episodes for {len(jobs)} jobs"
    return [episodes[index] for index in range(len(jobs))]
