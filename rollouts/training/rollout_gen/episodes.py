"""Many episodes at once, results in order, at most so many alive: the pool for those who need all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.agent import Episode
from rollouts.inference.base import InferenceBackend
from rollouts.training.rollout_gen.failures import Failures
from rollouts.training.rollout_gen.pool import EpisodePool, Job, Play, first_error

__all__ = ["Job", "Play", "first_error", "run_episodes"]


async def run_episodes(
    jobs: Sequence[Job],
    play: Play,
    inference: InferenceBackend,
    *,
    concurrency: int = 256,
    failures: Failures | None = None,
) -> list[Episode]:
    """Play every job; the result has the order of `jobs`.

    Cancellation ends all episodes (each closes its environment under its own deadline) and returns nothing. A
    RolloutsError that `play` raises ends them too, and is raised as it is; several give the first one. `failures` as in
    the pool.
    """
    episodes: dict[tuple[int, int], Episode] = {}

    def keep(job: Job, episode: Episode) -> None:
        episodes[job.order] = episode

    async with EpisodePool(play, inference, concurrency=concurrency, on_end=keep, failures=failures) as pool:
        pool.open()
        pool.add(jobs)
        await pool.finished()
    assert len(episodes) == len(jobs), f"{len(episodes)} episodes for {len(jobs)} jobs"
    return [episodes[job.order] for job in jobs]
