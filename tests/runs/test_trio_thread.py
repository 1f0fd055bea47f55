"""trio in a thread: the main thread waits for it, interrupts it, and gets its errors."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest
import trio

from rollouts.runs.chat import TrioThread


class Inner:
    """What is held open. `fails` is where it raises."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.closed = fails, 0
        self.broken = trio.Event()

    @contextlib.asynccontextmanager
    async def opened(self):
        try:
            if self.fails == "slow":
                await trio.sleep_forever()
            if self.fails == "enter":
                raise ValueError("cannot be opened")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                yield self
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
            self.closed += 1
        if self.fails == "exit":
            raise ValueError("cannot be closed")

    async def _watch(self):
        await self.broken.wait()
        raise ValueError("broke")

    async def double(self, n):
        await trio.lowlevel.checkpoint()
        return 2 * n

    async def stuck(self):
        await trio.sleep_forever()

    async def wrong(self):
        raise KeyError("wrong")


def interrupt_soon():
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()


def test_calls_return_and_raise_and_the_inner_one_is_closed():
    inner = Inner()
    with TrioThread(inner.opened()) as thread:
        assert thread.value is inner
        assert thread.call(inner.double, 21) == 42
        with pytest.raises(KeyError, match="wrong"):
            thread.call(inner.wrong)
        assert thread.call(inner.double, 1) == 2
    assert inner.closed == 1


def test_ctrl_c_cancels_a_call_and_the_next_one_works():
    inner = Inner()
    with TrioThread(inner.opened()) as thread:
        interrupt_soon()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            thread.call(inner.stuck)
        assert time.monotonic() - started < 5
        assert thread.call(inner.double, 2) == 4
    assert inner.closed == 1


def test_ctrl_c_while_it_opens_closes_it():
    inner = Inner("slow")
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt), TrioThread(inner.opened()):
        pass
    assert inner.closed == 1


@pytest.mark.parametrize(("fails", "words"), [("enter", "cannot be opened"), ("exit", "cannot be closed")])
def test_what_the_inner_one_raises_is_raised(fails, words):
    inner = Inner(fails)
    with pytest.raises(ValueError, match=words), TrioThread(inner.opened()):
        pass
    assert inner.closed == 1


def test_an_inner_one_that_cannot_be_opened_is_no_open_one_while_its_thread_ends():
    class Slow(TrioThread):
        def _run(self):
            super()._run()
            time.sleep(0.05)

    with pytest.raises(ValueError, match="cannot be opened"), Slow(Inner("enter").opened()):
        raise AssertionError("it is not open")


def test_an_error_in_the_block_is_not_hidden_by_one_of_the_closing():
    with pytest.raises(KeyError, match="mine"), TrioThread(Inner("exit").opened()):
        raise KeyError("mine")


def test_an_inner_one_that_breaks_ends_the_call_with_its_error():
    inner = Inner()

    async def break_it():
        inner.broken.set()
        await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as raised, TrioThread(inner.opened()) as thread:
        thread.call(break_it)
    assert raised.group_contains(ValueError, match="broke")
