"""Failed episodes: which ones are retried, how many a run may have, and how they are reported."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from rollouts.errors import RunError
from rollouts.inference.base import Capabilities
from rollouts.training.rollout_gen.groups import Group
from rollouts.training.rollout_gen.pool import WINDOW, FailurePolicy, Failures, Job, is_failure, run_episodes
from rollouts.training.rollout_gen.steps import failure_metrics, rollout_metrics
from rollouts.types import Episode, Sample, Score, Status, Task, Trajectory

TASK = Task("2 + 2?")


def episode(status=Status.COMPLETED, error=None, *, order=(0, 0), may_retry=False, value=1.0):
    trajectory = Trajectory(TASK, TASK.messages, status=status, error=error, metrics={"turns": 1.0})
    score = Score(None if status.is_infrastructure else value)
    return Episode(order, TASK, [trajectory], score, {"turns": 1.0}, may_retry=may_retry)


LOST = episode(Status.INFERENCE_ERROR, "the engine is gone", may_retry=True)
LATE = episode(Status.TIMEOUT, "too late")


def test_what_counts_as_failed():
    failed = {status for status in Status if is_failure(status)}
    assert failed == {Status.ENVIRONMENT_ERROR, Status.INFERENCE_ERROR, Status.TIMEOUT}


def test_one_is_played_again_as_often_as_the_policy_says():
    failures = Failures(FailurePolicy(retries=2))
    assert failures.settle(LOST, (0, 0)) is None
    assert failures.settle(episode(Status.ENVIRONMENT_ERROR, "no disk", may_retry=True), (0, 0)) is None
    kept = failures.settle(LOST, (0, 0))
    assert kept.status is Status.INFERENCE_ERROR
    assert (
        kept.trajectory.metrics
        == kept.metrics
        == {
            "turns": 1.0,
            "retried": 2.0,
            "retried/inference_error": 1.0,
            "retried/environment_error": 1.0,
        }
    )
    assert LOST.trajectory.metrics == {"turns": 1.0}, "the argument stays as it was"
    assert (failures.budget.settled, failures.budget.by_status, failures.retried) == (1, {"inference_error": 1}, 2)
    assert failures.settle(LOST, (0, 0)) is None, "what comes later under this order begins anew"


def test_what_is_not_played_again():
    failures = Failures(FailurePolicy(retries=5))
    for each in (LATE, LOST._replace(may_retry=False), episode(), episode(Status.TRUNCATED, may_retry=True)):
        assert failures.settle(each, (0, 0)) is each
    aborted = episode(Status.ABORTED, may_retry=True)
    assert (
        failures.settle(aborted, (0, 0)) is aborted and Failures(FailurePolicy(retries=0)).settle(LOST, (0, 0)) is LOST
    )
    samples = [Sample("x", status=Status.COMPLETED), Sample("x", status=Status.ENVIRONMENT_ERROR)]
    assert failures.settle(samples, (0, 0)) is samples, "one of them is there"
    late = [Sample("x", status=Status.TIMEOUT)]
    assert failures.settle(late, (0, 0)) is late


def test_samples_that_have_all_failed_are_made_again_and_counted():
    failures = Failures(FailurePolicy(retries=1, max_failures=3))
    lost = [Sample("x", status=Status.ENVIRONMENT_ERROR, metadata={"error": "no disk"})] * 2
    assert failures.settle(lost, (4, 0)) is None
    kept = failures.settle(lost, (4, 0))
    assert [sample.metadata["retried/environment_error"] for sample in kept] == [1.0, 1.0]
    assert (failures.budget.settled, failures.budget.by_status, failures.retried) == (2, {"environment_error": 2}, 1)
    assert lost[0].metadata == {"error": "no disk"}
    failures.settle(lost, (5, 0))
    with pytest.raises(RunError, match=r"3 of 3 rollouts failed(.|\n)*no disk"):
        failures.settle(lost, (5, 0))


def test_a_number_of_failures_ends_the_run():
    failures = Failures(FailurePolicy(0, 3))
    for each in (LOST, episode(), episode(Status.ABORTED), LATE, episode()):
        failures.settle(each, (0, 0))
    with pytest.raises(RunError) as caught:
        failures.settle(episode(Status.INFERENCE_ERROR, "the engine is gone\nwith a traceback"), (0, 0))
    assert str(caught.value) == (
        "3 of 6 rollouts failed, and --max-failures is 3\n"
        "by status: inference_error 2, timeout 1\n"
        "  2 x inference_error: the engine is gone\n"
        "  1 x timeout: too late"
    )


def test_a_share_of_the_last_ones_ends_the_run():
    failures = Failures(FailurePolicy(0, 0.5))
    for _ in range(WINDOW):
        failures.settle(episode(), (0, 0))
    for _ in range(WINDOW // 2):
        failures.settle(LATE, (0, 0))
    for _ in range(WINDOW):
        failures.settle(episode(), (0, 0))
    for _ in range(WINDOW // 2):
        failures.settle(LATE, (0, 0))
    with pytest.raises(RunError, match=r"101 of the last 200 rollouts failed, and --max-failures is 0\.5 of the last"):
        failures.settle(LATE, (0, 0))


def test_a_share_needs_no_full_window():
    failures = Failures(FailurePolicy(0, 0.1))
    with pytest.raises(RunError, match="21 of the last 21"):
        for _ in range(WINDOW):
            failures.settle(LATE, (0, 0))


def test_reasons_are_bounded_and_the_rest_is_counted():
    failures = Failures(FailurePolicy(0, 3000))
    with pytest.raises(RunError) as caught:
        for number in range(3000):
            failures.settle(episode(Status.TIMEOUT, f"at {number} " + "x" * 10_000), (0, 0))
    words = str(caught.value)
    assert len(words) < 2000 and "2000 x other reasons" in words and words.endswith("998 x other reasons")


def test_an_evaluation_shares_the_budget_but_not_the_orders():
    failures = Failures(FailurePolicy(1, 2))
    assert failures.settle(LOST, (0, 0)) is None
    other = failures.beside()
    assert other.settle(LOST, (0, 0)) is None and other.settle(LOST, (0, 0)).metrics["retried"] == 1.0
    with pytest.raises(RunError, match="2 of 2 rollouts"):
        failures.settle(LOST, (0, 0))


def test_metrics_name_each_cause():
    episodes = [LOST, LATE, LATE, episode(), episode(Status.TRUNCATED), episode(Status.ABORTED)]
    expected = {
        "rollout/fail/aborted": 1 / 6,
        "rollout/fail/inference_error": 1 / 6,
        "rollout/fail/timeout": 2 / 6,
    }
    assert failure_metrics(episodes) == expected and failure_metrics([]) == {}
    failures = Failures()
    failures.settle(LOST, (0, 0))
    metrics = rollout_metrics([Group(0, TASK, (*episodes, failures.settle(episode(), (0, 0))))])
    assert expected.keys() <= metrics.keys()
    assert metrics["rollout/retried"] == metrics["rollout/retried/inference_error"] == 1 / 7


# --- in a pool ------------------------------------------------------------------------------------------------------


class Engine:
    capabilities = Capabilities()
    context_tokens_max = vocabulary_size = version = 0

    def __init__(self):
        self.open = set()
        self.opened = 0

    def open_session(self, order):
        self.opened += 1
        name = f"{order}#{self.opened}"
        self.open.add(name)
        return name

    def close_session(self, session):
        self.open.discard(session)


def run(main):
    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("concurrency", [1, 3, 256])
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_every_job_ends_once_whatever_fails(concurrency, retries):
    generator = random.Random(concurrency + retries)
    engine, attempts = Engine(), {}
    jobs = [Job(TASK, (group, rollout)) for group in range(20) for rollout in range(5)]

    async def play(job, session, inference):
        assert session in engine.open, "each attempt has a session of its own"
        attempts[job.order] = attempts.get(job.order, 0) + 1
        await trio.sleep(generator.random())
        inference.close_session(session)
        await trio.sleep(generator.random())
        failed = generator.random() < 0.4
        status = Status.INFERENCE_ERROR if failed else Status.COMPLETED
        return episode(status, "lost", order=job.order, may_retry=failed)

    failures = Failures(FailurePolicy(retries))

    async def main():
        return await run_episodes(jobs, play, engine, concurrency=concurrency, failures=failures)

    episodes = run(main)
    assert [each.order for each in episodes] == [job.order for job in jobs]
    for each in episodes:
        assert each.metrics.get("retried", 0.0) == attempts[each.order] - 1 <= retries
        assert not is_failure(each.status) or attempts[each.order] == retries + 1
    assert failures.retried == sum(attempts.values()) - len(jobs)
    assert not engine.open


def test_an_engine_that_is_away_is_waited_for():
    """It is away for five seconds: three retries wait 1, 2 and 4."""
    jobs = [Job(TASK, (0, rollout)) for rollout in range(8)]

    async def play(job, session, inference):
        if trio.current_time() - began < 5:
            return LOST._replace(order=job.order)
        return episode(order=job.order)

    async def main():
        nonlocal began
        began = trio.current_time()
        return await run_episodes(
            jobs, play, Engine(), failures=Failures(FailurePolicy(3))
        ), trio.current_time() - began

    began = 0.0
    episodes, seconds = run(main)
    assert not any(is_failure(each.status) for each in episodes) and seconds == pytest.approx(7)


def test_an_engine_in_this_process_is_not_waited_for():
    engine = Engine()
    engine.capabilities = Capabilities(in_process=True)

    async def play(job, session, inference):
        return LOST._replace(order=job.order)

    async def main():
        with trio.fail_after(0.5):
            await run_episodes([Job(TASK, (0, 0))], play, engine, failures=Failures(FailurePolicy(3)))

    run(main)
    assert engine.opened == 4


def test_a_budget_ends_everything_and_leaves_nothing():
    engine = Engine()

    async def play(job, session, inference):
        await trio.sleep(job.order[1])
        inference.close_session(session)
        return LATE._replace(order=job.order)

    async def main():
        jobs = [Job(TASK, (0, rollout)) for rollout in range(30)]
        await run_episodes(jobs, play, engine, concurrency=4, failures=Failures(FailurePolicy(1, 5)))

    with pytest.raises(RunError, match="5 of 5 rollouts failed, and --max-failures is 5"):
        run(main)
    assert not engine.open
