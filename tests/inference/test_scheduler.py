from __future__ import annotations

import trio

from rollouts.errors import InferenceError
from rollouts.inference.base import GenerateRequest, Generation
from rollouts.inference.embedded.scheduler import BatchScheduler, PendingRequest


def pending(session: str | None, order: tuple[int, ...] = (), seed: int = 0) -> PendingRequest:
    return PendingRequest(GenerateRequest([1], 1, (), seed, order=order, session=session))


def test_a_batch_forms_when_every_open_session_waits_and_in_order():
    scheduler = BatchScheduler()
    first, second = scheduler.open((0, 0)), scheduler.open((0, 1))
    assert first != second
    late, early = pending(second, (0, 1, 0)), pending(first, (0, 0, 0))
    assert scheduler.add(late) and scheduler.take_batch() == []
    assert scheduler.missing() == [first]
    assert scheduler.add(early)
    assert scheduler.take_batch() == [early, late]
    assert scheduler.take_batch() == []


def test_closing_the_last_one_that_did_not_wait_forms_the_batch():
    scheduler = BatchScheduler()
    first, second = scheduler.open((0,)), scheduler.open((1,))
    waiting = pending(first)
    scheduler.add(waiting)
    assert scheduler.take_batch() == []
    scheduler.close(second)
    scheduler.close(second)
    assert scheduler.take_batch() == [waiting]
    assert len(scheduler.sessions) == 1


def test_a_cancelled_waiter_counts_as_one_that_does_not_wait():
    scheduler = BatchScheduler()
    first, second = scheduler.open((0,)), scheduler.open((1,))
    gone, other = pending(first), pending(second)
    scheduler.add(gone)
    scheduler.remove(gone)
    scheduler.remove(gone)
    scheduler.add(other)
    assert scheduler.take_batch() == []
    scheduler.close(first)
    assert scheduler.take_batch() == [other]


def test_requests_without_an_open_session_wait_for_no_session():
    scheduler = BatchScheduler()
    closed = scheduler.open((0,))
    scheduler.close(closed)
    scheduler.open((1,))
    requests = [pending(None, (2,)), pending("unknown", (1,)), pending(closed, (1,), seed=-1)]
    assert not any([scheduler.add(t) for t in requests])
    assert scheduler.take_batch() == []
    assert scheduler.take_sessionless() == [requests[2], requests[1], requests[0]]


def test_closing_a_session_fails_its_waiter():
    scheduler = BatchScheduler()
    session = scheduler.open((0,))
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
    scheduler = BatchScheduler()
    first, second, third = (scheduler.open((number,)) for number in range(3))
    scheduler.release(third)
    one, two, three = (pending(each, (place, 0)) for place, each in enumerate((first, second, third)))
    scheduler.add(one)
    scheduler.add(three)
    assert scheduler.missing() == [second] and scheduler.take_batch() == []
    scheduler.add(two)
    assert scheduler.take_batch() == [one, two, three]


def test_released_sessions_alone_start_when_no_batch_runs():
    scheduler = BatchScheduler()
    first, second = scheduler.open((0,)), scheduler.open((1,))
    scheduler.release(first)
    scheduler.release(second)
    scheduler.release("closed already")
    one, two = pending(first, (0, 0)), pending(second, (1, 0))
    scheduler.add(one)
    assert scheduler.take_batch() == [one] and not scheduler.may_start
    scheduler.add(two)
    assert scheduler.take_batch() == [] and not scheduler.may_start
    scheduler.remove(one)
    assert scheduler.may_start and scheduler.take_batch() == [two]
    scheduler.close(first)
    scheduler.close(second)
    assert not scheduler.may_start and not scheduler.missing()
