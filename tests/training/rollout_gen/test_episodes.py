"""run_episodes: ordered results, limited concurrency, sessions opened before and closed after, one error for all."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from rollouts.errors import EnvironmentDefinitionError, RewardError
from rollouts.inference.base import Capabilities
from rollouts.training.rollout_gen.pool import Job, run_episodes
from rollouts.types import Episode, Score, Status, Task, Trajectory

JOBS = [Job(Task(str(number)), (number // 2, number % 2)) for number in range(7)]


class Engine:
    """Only its sessions."""

    capabilities = Capabilities()
    context_tokens_max = vocabulary_size = version = 0

    def __init__(self):
        self.open = set()
        self.events = []
        self.most = 0

    def open_session(self, order):
        assert order not in self.open
        self.open.add(order)
        self.events.append(("open", order))
        self.most = max(self.most, len(self.open))
        return ".".join(map(str, order))

    def close_session(self, session):
        order = tuple(map(int, session.split(".")))
        if order in self.open:
            self.events.append(("close", order))
        self.open.discard(order)


def episode(job, value=1.0):
    trajectory = Trajectory(job.task, job.task.messages, status=Status.COMPLETED)
    return Episode(job.order, job.task, [trajectory], Score(value), {})


def run(play, *, concurrency=256, jobs=JOBS, engine=None):
    engine = engine or Engine()

    async def main():
        return await run_episodes(jobs, play, engine, concurrency=concurrency)

    try:
        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0)), engine
    finally:
        assert not engine.open, "every session is closed, whatever happens"


@pytest.mark.parametrize("concurrency", [1, 3, 256])
def test_results_have_the_order_of_the_jobs(concurrency):
    generator = random.Random(concurrency)
    alive = most = 0

    async def play(job, session, inference):
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        await trio.sleep(generator.random())
        alive -= 1
        return episode(job)

    episodes, engine = run(play, concurrency=concurrency)
    assert [each.order for each in episodes] == [job.order for job in JOBS]
    assert most == min(concurrency, len(JOBS))
    assert engine.most <= most + 1  # for an instant, the successor's beside the finished one's


def test_no_jobs():
    assert run(None, jobs=[])[0] == []


def test_sessions_are_open_before_any_task_runs():
    seen = []

    async def play(job, session, inference):
        seen.append(len(engine.open))
        inference.close_session(session)
        return episode(job)

    engine = Engine()
    run(play, engine=engine)
    assert seen[0] == len(JOBS)
    assert [name for name, _ in engine.events] == ["open"] * 7 + ["close"] * 7


def test_a_successor_is_announced_before_its_predecessor_leaves():
    """However long a reward takes: otherwise the batches of an in-process engine would depend on the clock."""

    async def play(job, session, inference):
        await trio.sleep(1)
        inference.close_session(session)
        await trio.sleep(job.order[0])  # the reward
        return episode(job)

    _, engine = run(play, concurrency=2)
    open_at_close = []
    count = 0
    for name, _ in engine.events:
        count += 1 if name == "open" else -1
        if name == "close":
            open_at_close.append(count)
    assert open_at_close == [2, 2, 2, 2, 2, 1, 0]


@pytest.mark.parametrize("error", [RewardError("reward 'x' returned nan"), EnvironmentDefinitionError("no hints")])
@pytest.mark.parametrize("concurrency", [2, 256])
def test_an_error_ends_all(error, concurrency):
    cancelled = []

    async def play(job, session, inference):
        if job.order == (0, 1):
            await trio.sleep(1)
            inference.close_session(session)  # its successor is announced, and must be closed too
            raise error
        try:
            await trio.sleep(60)
        except trio.Cancelled:
            cancelled.append(job.order)
            raise
        return episode(job)

    with pytest.raises(type(error)) as caught:
        run(play, concurrency=concurrency)
    assert caught.value is error, "the error itself, not a group of one"
    assert len(cancelled) == min(concurrency, 7) - 1


def test_of_many_errors_one_is_told():
    async def play(job, session, inference):
        raise RewardError(f"of {job.order}")

    with pytest.raises(RewardError, match="of "):
        run(play)


def test_a_bug_does_not_hide_behind_a_known_error():
    async def play(job, session, inference):
        if job.order == (0, 0):
            raise RewardError("known")
        if job.order == (0, 1):
            raise ZeroDivisionError
        await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        run(play)
    assert caught.value.split(ZeroDivisionError)[0] is not None


def test_cancellation_closes_every_session():
    engine = Engine()

    async def play(job, session, inference):
        await trio.sleep_forever()

    async def main():
        with trio.move_on_after(1) as scope:
            await run_episodes(JOBS, play, engine, concurrency=3)
        assert scope.cancelled_caught

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert not engine.open


def test_a_job_sees_the_rest_of_the_engine():
    async def play(job, session, inference):
        assert inference.backend.most == 7
        return episode(job)

    run(play)
