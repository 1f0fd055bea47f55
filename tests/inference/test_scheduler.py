from __future__ import annotations

import trio

from rollouts.errors import InferenceError
from rollouts.inference.base import GenerateRequest, Generation
from rollouts.inference.embedded.scheduler import BatchScheduler, PendingRequest


class Scheduler(BatchScheduler):
    """Keeps what it starts."""

    def __init__(self) -> None:
        self.begun: list[PendingRequest] = []
        super().__init__(self.begun.extend)

    def begin(self) -> list[PendingRequest]:
        begun = list(self.begun)
        self.begun.clear()
        return begun


def pending(session: str | None, order: tuple[int, ...] = (), seed: int = 0) -> PendingRequest:
    return PendingRequest(GenerateRequest([1], 1, (), seed, order=order, session=session))


def test_a_batch_forms_when_every_open_session_waits_and_in_order():
    scheduler = Scheduler()
    first, second = scheduler.open((0, 0)), scheduler.open((0, 1))
    assert first != second
    late, early = pending(second, (0, 1, 0)), pending(first, (0, 0, 0))
    assert scheduler.add(late) and scheduler.begin() == []
    assert scheduler.missing() == [first]
    assert scheduler.add(early)
    assert scheduler.begin() == [early, late]
    assert scheduler.begin() == []


def test_closing_the_last_one_that_did_not_wait_forms_the_batch():
    scheduler = Scheduler()
    first, second = scheduler.open((0,)), scheduler.open((1,))
    waiting = pending(first)
    scheduler.add(waiting)
    assert scheduler.begin() == []
    scheduler.close(second)
    scheduler.close(second)
    assert scheduler.begin() == [waiting]
    assert len(scheduler.sessions) == 1


def test_a_cancelled_waiter_counts_as_one_that_does_not_wait():
    scheduler = Scheduler()
    first, second = scheduler.open((0,)), scheduler.open((1,))
    gone, other = pending(first), pending(second)
    scheduler.add(gone)
    scheduler.remove(gone)
    scheduler.remove(gone)
    scheduler.add(other)
    assert scheduler.begin() == []
    scheduler.close(first)
    assert scheduler.begin() == [other]


def test_requests_without_an_open_session_wait_for_no_session():
    scheduler = Scheduler()
    closed = scheduler.open((0,))
    scheduler.close(closed)
    scheduler.open((1,))
    requests = [pending(None, (2,)), pending("unknown", (1,)), pending(closed, (1,), seed=-1)]
    assert not any([scheduler.add(t) for t in requests])
    assert scheduler.begin() == []
    scheduler.start_sessionless()
    assert scheduler.begin() == [requests[2], requests[1], requests[0]]


def test_closing_a_session_fails_its_waiter():
    scheduler = Scheduler()
    session, _ = scheduler.open((0,)), scheduler.open((1,))
    waiting = pending(session)
    scheduler.add(waiting)
    scheduler.close(session)
    trio.run(waiting.done.wait)
    assert isinstance(waiting.answer, InferenceError) and "closed while it waited" in str(waiting.answer)


def test_only_the_first_resolution_counts():
    waiting = pending(None)
    answer = Generation([1], [0.0], "length", [])
    waiting.resolve(answer)
    waiting.resolve(InferenceError("late"))
    assert waiting.done.is_set() and waiting.answer is answer


def test_no_batch_waits_for_a_released_session_whose_requests_join_it():
    scheduler = Scheduler()
    first, second, third = (scheduler.open((number,)) for number in range(3))
    scheduler.release(third)
    one, two, three = (pending(each, (place, 0)) for place, each in enumerate((first, second, third)))
    scheduler.add(one)
    scheduler.add(three)
    assert scheduler.missing() == [second] and scheduler.begin() == []
    scheduler.add(two)
    assert scheduler.begin() == [one, two, three]


def test_released_sessions_alone_start_when_no_batch_runs():
    scheduler = Scheduler()
    first, second = scheduler.open((0,)), scheduler.open((1,))
    scheduler.release(first)
    scheduler.release(second)
    scheduler.release("closed already")
    one, two = pending(first, (0, 0)), pending(second, (1, 0))
    scheduler.add(one)
    assert scheduler.begin() == [one]
    scheduler.add(two)
    assert scheduler.begin() == []
    scheduler.remove(one)
    assert scheduler.begin() == [two]
    scheduler.close(first)
    scheduler.close(second)
    assert scheduler.begin() == [] and not scheduler.missing()
