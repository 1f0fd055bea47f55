from __future__ import annotations

import pytest
import trio

from rollouts.errors import InferenceError
from rollouts.inference.base import GenerateRequest, Generation
from rollouts.inference.waves import Ticket, WaveBook


def ticket(session: str | None, order: tuple[int, ...] = (), seed: int = 0) -> Ticket:
    return Ticket(GenerateRequest([1], 1, (), seed, order=order, session=session))


def test_a_wave_forms_when_every_open_session_waits_and_in_order():
    book = WaveBook()
    first, second = book.open((0, 0)), book.open((0, 1))
    assert first != second
    late, early = ticket(second, (0, 1, 0)), ticket(first, (0, 0, 0))
    assert book.add(late) and book.take_wave() == []
    assert book.missing() == [first]
    assert book.add(early)
    assert book.take_wave() == [early, late]
    assert book.take_wave() == []


def test_closing_the_last_one_that_did_not_wait_forms_the_wave():
    book = WaveBook()
    first, second = book.open((0,)), book.open((1,))
    waiting = ticket(first)
    book.add(waiting)
    assert book.take_wave() == []
    book.close(second)
    book.close(second)
    assert book.take_wave() == [waiting]
    assert book.open_sessions == 1


def test_a_cancelled_waiter_counts_as_one_that_does_not_wait():
    book = WaveBook()
    first, second = book.open((0,)), book.open((1,))
    gone, other = ticket(first), ticket(second)
    book.add(gone)
    book.remove(gone)
    book.remove(gone)
    book.add(other)
    assert book.take_wave() == []
    book.close(first)
    assert book.take_wave() == [other]


def test_requests_without_an_open_session_need_nobody():
    book = WaveBook()
    closed = book.open((0,))
    book.close(closed)
    book.open((1,))
    tickets = [ticket(None, (2,)), ticket("unknown", (1,)), ticket(closed, (1,), seed=-1)]
    assert not any([book.add(t) for t in tickets])
    assert book.take_wave() == []
    assert book.take_loose() == [tickets[2], tickets[1], tickets[0]]


def test_closing_a_session_fails_its_waiter():
    book = WaveBook()
    session = book.open((0,))
    waiting = ticket(session)
    book.add(waiting)
    book.close(session)
    with pytest.raises(InferenceError, match="closed while it waited"):
        trio.run(waiting.wait)


def test_only_the_first_resolution_counts():
    waiting = ticket(None)
    answer = Generation([1], [0.0], "length", [])
    waiting.resolve(answer)
    waiting.resolve(None, InferenceError("late"))
    assert trio.run(waiting.wait) is answer
