"""Worker threads: results and errors come back, none waits behind a long job, what is given up disturbs nobody."""

from __future__ import annotations

import contextvars
import threading
import time

import pytest
import trio

from rollouts.env import threads as room
from rollouts.env.threads import run_in_thread


def test_results_errors_and_context_come_and_go():
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")

    async def run() -> None:
        name.set("mine")
        assert await run_in_thread(lambda: (name.get(), threading.current_thread().name)) == ("mine", "rollouts-worker")
        with pytest.raises(ZeroDivisionError):
            await run_in_thread(lambda: 1 // 0)

    trio.run(run)
    trio.run(run)  # and in another run of trio, by the same threads


def test_many_come_back_each_to_its_own():
    async def run() -> None:
        found: dict[int, int] = {}

        async def one(number: int) -> None:
            for _ in range(5):
                found[number] = await run_in_thread(lambda: number * number)

        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(one, number)
        assert found == {number: number * number for number in range(200)}

    trio.run(run)


def test_none_waits_behind_a_long_one():
    gate = threading.Event()

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(run_in_thread, lambda: gate.wait(10))
            for _ in range(20):
                with trio.fail_after(5):
                    assert await run_in_thread(lambda: 7) == 7
            gate.set()

    trio.run(run)


def test_where_no_thread_can_be_started_the_caller_is_told_and_the_others_go_on(monkeypatch):
    room._workers = room._WorkerThreads()
    refuse = False
    start = threading.Thread.start

    def may_start(thread):
        if refuse:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(room.threading.Thread, "start", may_start)

    async def main() -> None:
        nonlocal refuse
        refuse = True
        ran = []
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await run_in_thread(lambda: ran.append(1))
        refuse = False
        assert await run_in_thread(lambda: 7) == 7
        assert not ran, "whoever was told that it failed must not see it happen"
        await trio.sleep(0.05)  # the thread is idle
        refuse = True
        gate, found = threading.Event(), []

        async def ask(number: int) -> None:
            found.append(await run_in_thread(lambda: gate.wait(5) and number))

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                for number in range(3):  # one thread, and two that wait behind it
                    nursery.start_soon(ask, number)
                await trio.sleep(0.05)
                gate.set()
        assert sorted(found) == [0, 1, 2]

    trio.run(main)


def test_what_is_given_up_runs_on_and_is_not_heard():
    ended = threading.Event()

    async def run() -> None:
        with trio.move_on_after(0.02) as scope:
            await run_in_thread(lambda: (time.sleep(0.1), ended.set()))
        assert scope.cancelled_caught and not ended.is_set()
        assert await run_in_thread(lambda: 3) == 3
        await trio.sleep(0.2)

    trio.run(run)
    assert ended.is_set()
