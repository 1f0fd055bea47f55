from __future__ import annotations

import trio

from rollouts.errors import InferenceError
from rollouts.inference.base import GenerateRequest, Generation
from rollouts.inference.embedded.scheduler import Scheduler, Ticket


def ticket(session: str | None, order: tuple[int, ...] = (), seed: int = 0) -> Ticket:
    return Ticket(GenerateRequest([1], 1, (), seed, order=order, session=session))


def test_a_wave_forms_when_every_open_session_waits_and_in_order():
    scheduler = Scheduler()
    first, second = scheduler.open((0, 0)), scheduler.open((0, 1))
    assert first != second
    late, early = ticket(second, (0, 1, 0)), ticket(first, (0, 0, 0))
    assert scheduler.add(late) and scheduler.take_wave() == []
    assert scheduler.missing() == [first]
    assert scheduler.add(early)
    assert scheduler.take_wave() == [early, late]
    assert scheduler.take_wave() == []


def test_closing_the_last_one_that_did_not_wait_forms_the_wave():
    scheduler = Scheduler()
    first, second = scheduler.open((0,)), scheduler.open((1,))
    waiting = ticket(first)
    scheduler.add(waiting)
    assert scheduler.take_wave() == []
    scheduler.close(second)
    scheduler.close(second)
    assert scheduler.take_wave() == [waiting]
    assert len(scheduler.sessions) == 1


def test_a_cancelled_waiter_counts_as_one_that_does_not_wait():
    scheduler = Scheduler()
    first, second = scheduler.open((0,)), scheduler.open((1,))
    gone, other = ticket(first), ticket(second)
    scheduler.add(gone)
    scheduler.remove(gone)
    scheduler.remove(gone)
    scheduler.add(other)
    assert scheduler.take_wave() == []
    scheduler.close(first)
    assert scheduler.take_wave() == [other]


def test_requests_without_an_open_session_need_nobody():
    scheduler = Scheduler()
    closed = scheduler.open((0,))
    scheduler.close(closed)
    scheduler.open((1,))
    tickets = [ticket(None, (2,)), ticket("unknown", (1,)), ticket(closed, (1,), seed=-1)]
    assert not any([scheduler.add(t) for t in tickets])
    assert scheduler.take_wave() == []
    assert scheduler.take_loose() == [tickets[2], tickets[1], tickets[0]]


def test_closing_a_session_fails_its_waiter():
    scheduler = Scheduler()
    session = scheduler.open((0,))
    waiting = ticket(session)
    scheduler.add(waiting)
    scheduler.close(session)
    trio.run(waiting.done.wait)
    assert isinstance(waiting.answer, InferenceError) and "closed while it waited" in str(waiting.answer)


def test_only_the_first_resolution_counts():
    waiting = ticket(None)
    answer = Generation([1], [0.0], "length", [])
    waiting.resolve(answer)
    waiting.resolve(InferenceError("late"))
    assert waiting.done.is_set() and waiting.answer is answer
