"""The clock of an episode: deadlines that stand still while the episode does."""

from __future__ import annotations

import functools

import pytest
import trio
import trio.testing

from rollouts.inference.suspend import EpisodeClock


def run(main):
    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_it_counts_without_pauses():
    async def main():
        clock = EpisodeClock()
        assert clock.elapsed == 0.0
        clock.begin()
        await trio.sleep(2)
        clock.pause()
        clock.pause()
        await trio.sleep(100)
        assert clock.is_paused and clock.elapsed == pytest.approx(2)
        clock.resume()
        clock.resume()
        await trio.sleep(3)
        assert clock.elapsed == pytest.approx(5)
        clock.begin()
        assert clock.elapsed == 0.0

    run(main)


@pytest.mark.parametrize("pause_at", [0.0, 1.0, 4.9])
def test_a_deadline_waits_while_it_is_paused(pause_at):
    async def main():
        clock = EpisodeClock()
        clock.begin()
        began = trio.current_time()

        async def pause():
            await trio.sleep(pause_at)
            clock.pause()
            await trio.sleep(1000)
            clock.resume()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pause)
            await trio.lowlevel.checkpoint()
            with clock.move_on_after(5) as outer, clock.move_on_after(7) as inner:
                await trio.sleep_forever()
        assert outer.cancelled_caught and not inner.cancelled_caught
        assert trio.current_time() - began == pytest.approx(1005)
        assert clock.elapsed == pytest.approx(5)

    run(main)


def test_a_deadline_that_begins_during_a_pause():
    async def main():
        clock = EpisodeClock()
        clock.begin()
        clock.pause()
        with clock.move_on_after(1) as scope:
            await trio.sleep(50)
            clock.resume()
            await trio.sleep(50)
        assert scope.cancelled_caught and clock.elapsed == pytest.approx(1)

    run(main)


def test_no_deadline():
    async def main():
        clock = EpisodeClock()
        clock.begin()
        with clock.move_on_after(float("inf")) as scope:
            clock.pause()
            clock.resume()
            await trio.sleep(80_000)
        assert not scope.cancelled_caught

    run(main)


def test_a_clock_of_an_open_deadline_does_not_begin_again():
    async def main():
        clock = EpisodeClock()
        clock.begin()
        with clock.move_on_after(1):
            clock.begin()

    with pytest.raises(AssertionError, match="before its deadlines"):
        run(functools.partial(main))
