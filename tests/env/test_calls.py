from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.lowlevel

from rollouts.env import calls
from rollouts.errors import EnvironmentDefinitionError


def run(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    return trio.run(functools.partial(calls.call, function, *args, **keywords))


def test_plain_functions_run_in_another_thread() -> None:
    assert run(threading.get_ident) != threading.get_ident()
    assert run(lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match=r"sys.exit\(2\)"):
        run(functools.partial(exec, "raise SystemExit(2)"))


async def on_trio(value: int) -> int:
    await trio.lowlevel.checkpoint()
    return value


def test_trio_functions_run_here() -> None:
    assert run(on_trio, 3) == run(functools.partial(on_trio, value=3)) == run(lambda: on_trio(3)) == 3
    with pytest.raises(trio.TooSlowError):
        run(trio.sleep_forever, timeout_seconds=0.02)


class Client:
    """An asyncio environment with a connection: what `setup` makes on the loop, a tool uses later."""

    async_library = "asyncio"

    async def setup(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[int] = asyncio.Queue()

    async def fetch(self, n: int) -> int:
        assert asyncio.get_running_loop() is self.loop
        async with asyncio.timeout(5):
            task = asyncio.create_task(self._later(n))
            found = await self.queue.get()
            await task
        return found

    async def _later(self, n: int) -> None:
        await asyncio.sleep(0.005)
        self.queue.put_nowait(n)

    async def slow(self, log: list[str]) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            log.append("cleaned up")
            raise

    async def fail(self) -> None:
        raise LookupError("not here")

    async def cancel_itself(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    async def leave(self) -> None:
        raise SystemExit(1)

    async def block(self, released: threading.Event) -> None:
        released.wait(10)


def test_asyncio_functions_share_one_loop() -> None:
    client = Client()

    async def main() -> list[int]:
        await calls.call(client.setup)
        found: list[int] = []
        for n in range(3):
            found.append(await calls.call(client.fetch, n))
        return found

    assert trio.run(main) == [0, 1, 2]
    assert run(client.fetch, 5) == 5, "also from the next trio run"


def test_asyncio_deadlines_and_errors() -> None:
    client, log = Client(), list[str]()
    with pytest.raises(trio.TooSlowError):
        run(client.slow, log, timeout_seconds=0.05)
    assert log == ["cleaned up"]
    with pytest.raises(LookupError, match="not here"):
        run(client.fail)
    with pytest.raises(RuntimeError, match="cancelled itself"):
        run(client.cancel_itself)
    with pytest.raises(RuntimeError, match=r"sys.exit\(1\)"):
        run(client.leave)
    assert calls.abandoned_count() == 0


def test_a_blocked_loop_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_SECONDS", 0.05)
    client, released = Client(), threading.Event()
    with pytest.raises(trio.TooSlowError):
        run(client.block, released, timeout_seconds=0.05)
    assert calls.abandoned_count() == 1
    run(client.setup, timeout_seconds=2)
    assert run(client.fetch, 1, timeout_seconds=2) == 1
    released.set()
    wait_until(lambda: calls.abandoned_count() == 0)


class Shared:
    async def block(self, seconds: float) -> None:
        await asyncio.sleep(0)
        time.sleep(seconds)  # noqa: ASYNC251 - the mistake that is tested

    async def nap(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    async def stop(self) -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(1)


def outcomes_of(*calls_made: tuple[Callable[..., Any], float, float]) -> list[Any]:
    """What became of calls that ran at once: (function, its argument, its deadline)."""
    outcomes: list[Any] = [None] * len(calls_made)

    async def one(index: int, function: Callable[..., Any], argument: Any, seconds: float) -> None:
        try:
            outcomes[index] = await calls.call(function, argument, timeout_seconds=seconds)
        except Exception as error:
            outcomes[index] = error

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for index, (function, argument, seconds) in enumerate(calls_made):
                nursery.start_soon(one, index, function, argument, seconds)

    trio.run(main)
    return outcomes


def test_a_call_that_blocks_the_loop_takes_no_other_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """B and C finish when the block ends, D's own deadline passes before; whoever comes later has a new loop."""
    monkeypatch.setattr(calls, "GRACE_SECONDS", 0.05)
    shared = Shared()
    nap = functools.partial(shared.nap)
    blocked = (shared.block, 0.5, 0.1)
    a, b, c, d = outcomes_of(blocked, (nap, 0.02, 5.0), (shared.nap, 0.02, 5.0), (shared.nap, 0.02, 0.2))
    assert isinstance(a, trio.TooSlowError) and isinstance(d, trio.TooSlowError)
    assert (b, c) == ("slept", "slept")
    assert run(shared.nap, 0, timeout_seconds=5) == "slept"
    wait_until(lambda: calls.abandoned_count() == 0)


def test_cancelling_on_a_loop_that_is_closed_stays_a_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = calls._AsyncioBridge()
    loop = bridge._loop
    wait_until(loop.is_running)

    class Closed:
        """Takes the call's start, and is closed by the time of its cancellation."""

        started = False

        def call_soon_threadsafe(self, callback: Callable[[], Any]) -> None:
            if self.started:
                raise RuntimeError("Event loop is closed")
            self.started = True
            loop.call_soon_threadsafe(callback)

    with monkeypatch.context() as patched:
        patched.setattr(calls, "_bridge", bridge)
        patched.setattr(bridge, "_loop", Closed())
        with pytest.raises(trio.TooSlowError):
            run(Shared().nap, 0.06, timeout_seconds=0.03)
    time.sleep(0.1)  # the nap ends by itself: nobody could cancel it
    bridge.close()


def test_a_loop_that_somebody_stops_fails_its_calls_by_name() -> None:
    shared = Shared()
    stopped, other = outcomes_of((lambda _: shared.stop(), 0, 5.0), (shared.nap, 1, 5.0))
    for outcome in (stopped, other):
        assert isinstance(outcome, RuntimeError) and "was stopped" in str(outcome)
    assert run(shared.nap, 0, timeout_seconds=5) == "slept"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_a_blocked_thread_gives_its_slot_back_at_once() -> None:
    released, limiter, finished = threading.Event(), trio.CapacityLimiter(1), []

    async def main() -> str:
        for _ in range(3):
            with pytest.raises(trio.TooSlowError):
                await calls.call(blocked, timeout_seconds=0.03, limiter=limiter)
        assert (limiter.borrowed_tokens, calls.abandoned_count()) == (0, 3)
        return await calls.call(lambda: "free", timeout_seconds=1.0, limiter=limiter)

    def blocked() -> None:
        released.wait(60)
        finished.append("blocked")

    assert trio.run(main) == "free" and not finished
    released.set()
    wait_until(lambda: calls.abandoned_count() == 0)


def test_the_limiter_bounds_what_runs_at_once() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    async def main() -> None:
        limiter = trio.CapacityLimiter(2)
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                # The deadline does not count the wait for a slot.
                nursery.start_soon(functools.partial(calls.call, work, timeout_seconds=0.5, limiter=limiter))

    trio.run(main)
    assert most == 2


def test_past_the_bound_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ABANDONED_MAX", 1)
    released = threading.Event()
    with pytest.raises(trio.TooSlowError):
        run(released.wait, 10, timeout_seconds=0.02)
    with pytest.raises(
        calls.AbandonedCallsError,
        match="1 call into the environment ran past its deadline and still runs in its thread;",
    ):
        run(int)
    assert run(on_trio, 1) == 1
    released.set()
    wait_until(lambda: calls.abandoned_count() == 0)
    assert run(int) == 0


class Plain:
    async def uses_asyncio(self) -> None:
        await asyncio.sleep(0)

    async def uses_trio(self) -> None:
        await trio.lowlevel.checkpoint()

    async def neither(self) -> None: ...


class Declared(Plain):
    async_library = "asyncio"


def method_in(source: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return namespace["f"]


@pytest.mark.parametrize(
    ("function", "library"),
    [
        (Plain().uses_asyncio, "asyncio"),
        (Plain().uses_trio, "trio"),
        (Plain().neither, "trio"),  # this module imports both
        (Declared().uses_trio, "asyncio"),
        (method_in("import asyncio\nasync def f(): await helper()"), "asyncio"),
        (method_in("from asyncio import sleep\nasync def f(): await sleep(0)"), "asyncio"),
        (method_in("async def f():\n import aiohttp\n await aiohttp.x()"), "asyncio"),
        (method_in("import trio, asyncio\nasync def f(): await helper()"), "trio"),
        (method_in("async def f(): await helper()"), "trio"),
        (functools.partial(Declared().neither), "asyncio"),
    ],
)
def test_which_library_a_function_is_written_for(function: Callable[..., Any], library: str) -> None:
    assert calls.async_library_of(function) == library


def test_undeclared_asyncio_runs_where_the_code_says_so_and_else_tells_how() -> None:
    assert run(Plain().uses_asyncio) is None
    hidden = method_in("async def f(other): await other()")
    with pytest.raises(EnvironmentDefinitionError, match='async_library = "asyncio"'):
        run(hidden, Plain().uses_asyncio)
    with pytest.raises(EnvironmentDefinitionError, match='async_library = "asyncio"'):
        run(hidden, functools.partial(asyncio.sleep, 1))


def test_where_trio_is_fixed_nobody_is_told_to_declare_asyncio() -> None:
    with pytest.raises(EnvironmentDefinitionError, match=r"rollout runs under trio: use trio\.sleep") as caught:
        run(Plain().uses_asyncio, async_library="trio")
    assert "async_library" not in str(caught.value)


def test_cancellation_passes_through_a_blocked_thread() -> None:
    released = threading.Event()

    async def main() -> bool:
        with trio.move_on_after(0.03) as scope:
            await calls.call(released.wait, 10)
        return scope.cancelled_caught

    assert trio.run(main)
    released.set()
    wait_until(lambda: calls.abandoned_count() == 0)
