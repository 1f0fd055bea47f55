"""Many episodes at once, results in order, at most so many alive.

The set of live episodes decides how an in-process engine forms its batches, so it may depend on counts only, never on
the order in which trio runs tasks: sessions are opened here, before the tasks that use them run, and a finished
episode's successor is announced before the finished one is taken off.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

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


Play = Callable[[Job, str], Awaitable[Episode]]
"""Plays one job in the named inference session. It returns failed episodes as data; what it raises ends the run."""


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

    Cancellation ends all episodes (each closes its environment under its own deadline) and returns nothing.
    """
    assert concurrency > 0, concurrency
    episodes: dict[int, Episode] = {}
    upcoming = iter(enumerate(jobs))

    def announce() -> tuple[int, Job, str] | None:
        following = next(upcoming, None)
        return None if following is None else (*following, inference.open_session(following[1].order))

    async def work(current: tuple[int, Job, str] | None) -> None:
        while current is not None:
            index, job, session = current
            try:
                episodes[index] = await play(job, session)
                current = announce()
            finally:
                inference.close_session(session)

    first = [announce() for _ in range(min(concurrency, len(jobs)))]
    try:
        async with trio.open_nursery() as nursery:
            for job in first:
                nursery.start_soon(work, job)
    except* RolloutsError as group:
        raise first_error(group) from None
    assert len(episodes) == len(jobs), f"{len(episodes)} episodes for {len(jobs)} jobs"
    return [episodes[index] for index in range(len(jobs))]
