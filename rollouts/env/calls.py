"""Call an author's plain, trio or asyncio function from the agent loop, under a deadline.

- A plain function runs in a worker thread. At its deadline the call is abandoned: its slot of the limiter is free at
  once. Nothing can stop the thread, so it is counted until it ends. While `ABANDONED_MAX` abandoned threads run, new
  calls fail with AbandonedCallsError.
- A trio coroutine function runs in the calling task.
- An asyncio function runs on the process's one asyncio loop, which has its own thread. So a tool can use a session
  that `setup` opened. At the deadline its task is cancelled. If the task has not ended after `GRACE_SECONDS`, the loop
  is abandoned: the next call gets a new loop. Other calls on the abandoned loop continue there until their own
  deadlines.

The first of these rules that applies says whether an `async def` is trio or asyncio:
1. the environment has the attribute `async_library = "trio"` or `"asyncio"`;
2. the function's code names `trio`, or `asyncio` or a library that only works with it (`ASYNCIO_ONLY`);
3. the function's module imports `trio`, or `asyncio` or one of `ASYNCIO_ONLY`;
4. otherwise it is trio (anyio and httpx work with trio too). If asyncio code runs under trio, an
EnvironmentDefinitionError says to write rule 1.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import inspect
import math
import threading
import types
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Literal

import trio

from rollouts.author_code import authors_code, is_from_outside, unwrapped
from rollouts.env.results import ToolOutcome
from rollouts.env.threads import of_this_run, run_in_thread
from rollouts.error_log import is_logging, report
from rollouts.errors import EnvironmentDefinitionError, RolloutsError, counted
from rollouts.types import ToolCall

AsyncLibrary = Literal["trio", "asyncio"]

ABANDONED_MAX = 64  # threads that ran past their deadline and still run
SLOTS = 64  # worker threads of one trio run that work at the same time
ASYNCIO_UNDER_TRIO = ("no running event loop", "received unrecognized yield message")  # asyncio's error, trio's error
DECLARE = 'write `async_library = "asyncio"` in the environment\'s class'
UNDER_TRIO = "rollout runs under trio: use trio.sleep, trio.open_nursery, ..., and leave asyncio to the tools and setup"
PLAIN = (str, float, int, bool, types.NoneType)  # converting one runs no author's code
GRACE_SECONDS = 2.0  # how long an asyncio task may take to end after its cancellation
ASYNCIO_ONLY = frozenset(
    {"aiofiles", "aiohttp", "aiomysql", "aiopg", "aiosqlite", "asyncio", "asyncpg", "asyncssh", "motor", "uvloop"}
)


class AbandonedCallsError(RolloutsError):
    """Too many calls ran past their deadline and still run. Inside an episode: Status.ENVIRONMENT_ERROR."""


class CallTimeoutError(trio.TooSlowError):
    """The deadline that `call` set has passed (not a deadline inside the function)."""


class RemoteCall:
    """A function of an environment that runs in another process, which enforces the deadline. `requests` are the names
    of its parameters, if it is a reward or a metric.
    """

    requests: tuple[str, ...] = ()

    async def call(self, *args: Any, seconds: float = math.inf) -> Any:
        """The result. Raises like `call` below; an error of the author's code is a RemoteError."""
        raise NotImplementedError


class RemoteTool(RemoteCall):
    """A tool that runs in another process. `remote_schema` is the OpenAI function schema."""

    remote_schema: dict[str, Any]

    async def run(self, tool_call: ToolCall, characters_max: int, seconds_max: float) -> ToolOutcome:
        """The outcome of a model's call, as `rollouts.env.tools.run_tool` gives it there."""
        raise NotImplementedError


async def call(
    function: Callable[..., Any] | RemoteCall,
    *args: Any,
    timeout_seconds: float = math.inf,
    limiter: trio.CapacityLimiter | None = None,
    async_library: AsyncLibrary | None = None,
    convert: Callable[[Any], Any] | None = None,
) -> Any:
    """The result of `function(*args)`, awaited if necessary. The deadline starts when the call has a worker thread.

    `convert` is applied to the result. It may call `str` or `float` of an author's object, so it runs in a worker
    thread under the same deadline.

    `limiter` None: the limiter of the trio run, with `SLOTS` threads. `async_library` None: the rules in the module's
    docstring apply.

    Cancellation abandons a plain function, which continues in its thread, and cancels an asyncio task.

    Raises:
        CallTimeoutError: the deadline passed (a trio.TooSlowError).
        AbandonedCallsError: too many earlier calls still run past their deadlines.
        EnvironmentDefinitionError: asyncio code ran under trio.
        Exception: an error of the function. If it is not an Exception, or has no readable message, a RuntimeError
            replaces it.
    """
    if isinstance(function, RemoteCall):
        value = await function.call(*args, seconds=timeout_seconds)
        return value if convert is None else convert(value)
    make: Callable[[], Any] = functools.partial(function, *args)
    coroutine: types.CoroutineType[Any, Any, Any] | None = None
    if not inspect.iscoroutinefunction(_plain(function)):
        value = await _call_in_thread(make, timeout_seconds, limiter, convert)
        if not inspect.iscoroutine(value):
            return value
        coroutine, make = value, lambda: coroutine  # the function is a wrapper around an async function
    library = async_library or async_library_of(function, coroutine)
    with trio.CancelScope(deadline=trio.current_time() + timeout_seconds):
        is_fixed = async_library is not None
        value = await (_run_on_asyncio(make) if library == "asyncio" else _run_under_trio(make, is_fixed))
        if convert is None:
            return value
        if type(value) in PLAIN:
            return convert(value)
        return await _call_in_thread(functools.partial(convert, value), math.inf, None)
    raise CallTimeoutError


def uncancelled_count() -> int:
    """How many of the process's asyncio calls caught their cancellation and ended in another way."""
    return _counts["uncancelled"]


def abandoned_count() -> int:
    """The number of the process's threads that ran past their deadline and still run."""
    return _counts["abandoned"]


# --- trio or asyncio ------------------------------------------------------------------------------------------------


def asyncio_tasks() -> list[str]:
    """The names of the coroutines that environments run on the asyncio loop at this moment."""
    return _bridge.running() if _bridge is not None else []


def async_library_of(
    function: Callable[..., Any], coroutine: types.CoroutineType[Any, Any, Any] | None = None
) -> AsyncLibrary:
    """The library that a coroutine function, or the `coroutine` that a plain function returned, is written for. The
    rules are in the module's docstring.

    Raises EnvironmentDefinitionError if the environment's `async_library` is neither "trio" nor "asyncio".
    """
    owner = getattr(unwrapped(function), "__self__", None)
    declared = getattr(owner, "async_library", None)
    if declared in ("trio", "asyncio"):
        return "trio" if declared == "trio" else "asyncio"
    if declared is not None:
        raise EnvironmentDefinitionError(
            f"{type(owner).__name__}.async_library is {declared!r}; it may be 'trio' or 'asyncio'"
        )
    underlying = inspect.unwrap(_plain(function))
    code: types.CodeType | None = getattr(underlying, "__code__", None)
    namespace = getattr(underlying, "__globals__", {})
    if coroutine is not None:
        code, namespace = coroutine.cr_code, coroutine.cr_frame.f_globals if coroutine.cr_frame else {}
    if code is None:
        return "trio"
    used = [namespace[name] for name in code.co_names if name in namespace]
    for roots in (set(code.co_names), _roots_of(used), _roots_of(list(namespace.values()))):
        if "trio" in roots:
            return "trio"
        if roots & ASYNCIO_ONLY:
            return "asyncio"
    return "trio"


def _plain(function: Callable[..., Any]) -> Any:
    """The plain function inside partials, bound methods and callable objects."""
    current = unwrapped(function)
    if not isinstance(current, types.FunctionType | types.MethodType | types.BuiltinFunctionType | type):
        current = type(current).__call__ if callable(current) else current
    return getattr(current, "__func__", current)


def _roots_of(values: list[Any]) -> set[str]:
    """The top-level packages in which these values are defined."""
    names = [getattr(each, "__name__" if isinstance(each, types.ModuleType) else "__module__", None) for each in values]
    return {name.partition(".")[0] for name in names if isinstance(name, str)}


# --- running coroutines ---------------------------------------------------------------------------------------------


async def _run_under_trio(make: Callable[[], Awaitable[Any]], is_fixed: bool) -> Any:
    try:
        with authors_code(_passes):
            return await make()
    except (RuntimeError, TypeError) as error:
        if not any(words in str(error) for words in ASYNCIO_UNDER_TRIO):
            raise
        raise EnvironmentDefinitionError(
            "an async method awaits asyncio code but was run under trio; " + (UNDER_TRIO if is_fixed else DECLARE)
        ) from error


def _passes(error: BaseException) -> bool:
    """Whether an error from an author's trio code is raised unchanged: Ctrl-C, and trio's Cancelled during a
    cancellation.
    """
    if isinstance(error, trio.Cancelled):
        return trio.current_effective_deadline() == -math.inf
    return is_from_outside(error)


async def _run_on_asyncio(make: Callable[[], Awaitable[Any]]) -> Any:
    finished = trio.Event()
    trio_token = trio.lowlevel.current_trio_token()

    def wake() -> None:
        with contextlib.suppress(trio.RunFinishedError):  # no task waits any more
            trio_token.run_sync_soon(finished.set)

    bridge = _reserve_bridge(wake)
    try:
        return await bridge.run(make, wake, finished)
    finally:
        bridge.release(wake)


class _AsyncioBridge:
    """One asyncio loop in a daemon thread. Any trio run may call `run`.

    `waiting` holds a wake function for each call that a trio task waits for. It changes only under the module's
    `_lock`. An abandoned loop runs until these calls have ended, and then stops.
    """

    def __init__(self) -> None:
        self.waiting: set[Callable[[], None]] = set()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_stray)
        self._thread = threading.Thread(target=self._serve, name="rollouts-asyncio", daemon=True)
        self._is_abandoned = False
        self._has_ended = False
        self._thread.start()
        atexit.register(self.close)

    @property
    def usable(self) -> bool:
        return not (self._has_ended or self._is_abandoned)

    def _serve(self) -> None:
        try:
            while True:
                # If any task raises one of these two, asyncio raises it here too; code that awaits the task also gets
                # it.
                with contextlib.suppress(KeyboardInterrupt, SystemExit):
                    self._loop.run_forever()
                    break
        finally:
            with _lock:
                self._has_ended = True
                left = list(self.waiting)
            self._loop.close()
            for wake in left:  # an author's code stopped the loop, so nothing else wakes these tasks
                wake()
            if self._is_abandoned:
                _count("abandoned", -1)

    def close(self) -> None:
        """Stop the loop, and wait for its thread unless it was abandoned. Also called at interpreter exit."""
        atexit.unregister(self.close)
        if not self._has_ended:
            self._in_loop(self._loop.stop)
            if not self._is_abandoned:
                self._thread.join(1.0)

    def running(self) -> list[str]:
        """The names of the coroutines of all tasks that have not ended."""
        found: Future[list[str]] = Future()

        def look() -> None:
            tasks = [each for each in asyncio.all_tasks(self._loop) if not each.done()]
            found.set_result([getattr(each.get_coro(), "__qualname__", str(each)) for each in tasks])

        return found.result(GRACE_SECONDS) if self.usable and self._in_loop(look) else []

    async def run(self, make: Callable[[], Awaitable[Any]], wake: Callable[[], None], finished: trio.Event) -> Any:
        tasks: list[asyncio.Task[Any]] = []

        async def body() -> Any:
            with authors_code(lambda error: isinstance(error, asyncio.CancelledError) or is_from_outside(error)):
                return await make()

        def start() -> None:
            tasks.append(self._loop.create_task(body()))
            tasks[0].add_done_callback(lambda _: wake())

        if self._in_loop(start):
            try:
                await finished.wait()
            except trio.Cancelled:
                await self._cancel(tasks, finished)
                raise
        if not tasks or not tasks[0].done():
            raise RuntimeError("the asyncio loop that all environments share was stopped, by a tool or its library")
        if tasks[0].cancelled():
            raise RuntimeError("the asyncio task cancelled itself")
        return tasks[0].result()

    async def _cancel(self, tasks: list[asyncio.Task[Any]], finished: trio.Event) -> None:
        """Cancel the task, and wait until it has ended. If it has not ended after `GRACE_SECONDS`, abandon the loop."""
        accepted: list[bool] = []
        if not self._in_loop(lambda: accepted.append(tasks[0].cancel())):
            return
        with trio.CancelScope(shield=True, deadline=trio.current_time() + GRACE_SECONDS):
            await finished.wait()
        if not finished.is_set():
            self._abandon()
        elif tasks and tasks[0].done() and not tasks[0].cancelled():
            tasks[0].exception()  # read the exception, so that asyncio does not report it as never retrieved
            _count("uncancelled", sum(accepted))

    def _in_loop(self, callback: Callable[[], object]) -> bool:
        """Have the loop call `callback`. False if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _abandon(self) -> None:
        with _lock:
            was_usable = self.usable
            self._is_abandoned = self._is_abandoned or was_usable
        if was_usable:
            _count("abandoned", +1)
            atexit.unregister(self.close)  # the loop's daemon thread may be blocked for ever

    def release(self, wake: Callable[[], None]) -> None:
        """End the wait for this call. If the loop is abandoned and no other call waits for it, close it."""
        with _lock:
            self.waiting.discard(wake)
            is_last = self._is_abandoned and not self.waiting
        if is_last:
            self.close()


def _stray(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report the error of a task that nothing awaits. asyncio would print its traceback."""
    error = context.get("exception")
    if error is None or not is_logging():
        loop.default_exception_handler(context)
    else:
        report(error, "an asyncio task that nothing awaits")


_bridge: _AsyncioBridge | None = None


def _reserve_bridge(wake: Callable[[], None]) -> _AsyncioBridge:
    """The process's bridge, registered for this call. Makes a new one if the last one was abandoned or has ended."""
    global _bridge
    with _lock:
        if _bridge is None or not _bridge.usable:
            _refuse_too_many()
            _bridge = _AsyncioBridge()
        _bridge.waiting.add(wake)
        return _bridge


# --- worker threads -------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_counts = Counter[str]()
_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("rollouts-calls-limiter")


def _count(what: str, change: int) -> None:
    with _lock:
        _counts[what] += change


def _refuse_too_many() -> None:
    if (running := abandoned_count()) >= ABANDONED_MAX:
        rest = "its deadline and still runs in its thread"
        if running > 1:
            rest = "their deadlines and still run in their threads"
        raise AbandonedCallsError(
            f"{counted(running, 'call')} into the environment ran past {rest}; a tool that can hang must have a time "
            "limit of its own (a socket or subprocess timeout), or be written async, which can be cancelled"
        )


async def _call_in_thread(
    make: Callable[[], Any],
    timeout_seconds: float,
    limiter: trio.CapacityLimiter | None,
    convert: Callable[[Any], Any] | None = None,
) -> Any:
    _refuse_too_many()
    slots = limiter or of_this_run(_limiter, lambda: trio.CapacityLimiter(SLOTS))

    def run() -> Any:
        with authors_code():
            value = make()
            return value if convert is None or inspect.iscoroutine(value) else convert(value)

    try:
        slots.acquire_on_behalf_of_nowait(run)  # waiting would let trio's scheduler run once
    except trio.WouldBlock:
        await slots.acquire_on_behalf_of(run)
    try:
        with trio.CancelScope(deadline=trio.current_time() + timeout_seconds):
            return await run_in_thread(run, functools.partial(_count, "abandoned"))
        raise CallTimeoutError
    finally:
        slots.release_on_behalf_of(run)
