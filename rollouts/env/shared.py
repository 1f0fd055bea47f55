"""`shared(self)`: what all episodes of a process use, such as an index, a loaded data set or a client of a service.

The value is made once for each class and settings, when a method that names `shared` is first called. `shared` runs on
an environment object of its own, in a thread of its own:

- A function returns the value.
- A generator yields the value once. The rest of it runs at the end, in the same thread.
- An async function or generator runs on the asyncio loop that all environments share, or else under trio (the rules are
  those of `calls`). A generator runs in one task.

The value is made when it is first needed, and the clean-up runs when the last `shared_values` block ends. Not here:
which method names `shared` (`methods`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import inspect
import math
import threading
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any

import trio

from rollouts.author_code import Place, authors_code, place_of_function
from rollouts.env.advice import EnvironmentWarning
from rollouts.env.authoring import environment_name
from rollouts.env.calls import CallTimeoutError, async_library_of, call
from rollouts.errors import EnvironmentDefinitionError, UserError, words_of

CLEANUP_SECONDS = 10.0
ONCE = "a generator yields the value once, and cleans up after the `yield`"


class SharedValue:
    """The value of `shared` for one class and settings. Its thread starts at once. Any thread may use this object.

    `make` builds an environment object.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._function: Any = None
        self._label = "shared()"
        self._value: Future[Any] = Future()
        self._end: Future[None] = Future()
        self._is_over = threading.Event()
        threading.Thread(target=self._serve, name="rollouts-shared", daemon=True).start()

    def get_now(self) -> Any:
        """The value; waits until it is made. Raises EnvironmentDefinitionError, with the author's line, if `shared`
        raised.
        """
        error = self._value.exception()
        if error is not None:
            raise EnvironmentDefinitionError(str(error)) from error  # each caller gets an error of its own
        return self._value.result()

    async def get(self, seconds: float = math.inf) -> Any:
        """Like `get_now`, in a trio task. Raises CallTimeoutError if it takes longer than `seconds`."""
        if not self._value.done():
            made, token = trio.Event(), trio.lowlevel.current_trio_token()
            self._value.add_done_callback(lambda _: _soon(token, made.set))
            with trio.move_on_after(seconds):
                await made.wait()
            if not made.is_set():
                raise CallTimeoutError
        return self.get_now()

    @property
    def has_failed(self) -> bool:
        """Whether `shared` raised."""
        return self._value.done() and self._value.exception() is not None

    def close(self, seconds: float = CLEANUP_SECONDS) -> None:
        """Clean up, for at most `seconds`. Issues an EnvironmentWarning if the clean-up fails or takes longer. Nothing
        waits for a value that is still being made: it is cleaned up when it is made, if the process still runs then.
        """
        self._end.set_result(None)
        if self._value.done() and not self._is_over.wait(seconds):
            self._warn(f"the clean-up of {self._label} took longer than {seconds:g} seconds, and was left")

    # --- in its own thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with authors_code():
                env = self._make()
                self._function, self._label = env.shared, f"{environment_name(env)}.shared()"
                self._hold(self._function())
        except Exception as error:  # the author's code may raise anything
            is_complete = isinstance(error, UserError) and not isinstance(error, EnvironmentDefinitionError)
            if not self._value.done() and is_complete:  # it says what to type
                self._value.set_exception(error)
            elif not self._value.done():
                self._value.set_exception(EnvironmentDefinitionError(f"{self._label} raised {words_of(error)}"))
            else:
                self._warn(f"the clean-up of {self._label} raised {words_of(error)}")
        finally:
            self._is_over.set()

    def _hold(self, made: Any) -> None:
        """Publish the value of what `shared` returned. If it is a generator, wait for the end and clean up."""
        plain = inspect.unwrap(self._function)
        is_async = inspect.isasyncgenfunction(plain)
        if inspect.isgeneratorfunction(plain):
            self._hold_generator(made)
        elif is_async or inspect.iscoroutine(made):
            library = async_library_of(self._function, None if is_async else made)
            hold = self._hold_async_generator if is_async else self._publish_awaited
            if library == "asyncio":
                held = functools.partial(hold, made, _until_on_asyncio)
                trio.run(functools.partial(call, held, async_library="asyncio"))
            else:
                trio.run(call, functools.partial(hold, made, _until_under_trio))
        else:
            self._value.set_result(made)

    def _hold_generator(self, made: Generator[Any, None, None]) -> None:
        with contextlib.closing(made):
            for value in made:
                self._publish(value)
                del value
                self._end.result()
        self._check_has_yielded()

    async def _hold_async_generator(
        self, made: AsyncGenerator[Any, None], wait: Callable[[Future[None]], Awaitable[None]]
    ) -> None:
        async with contextlib.aclosing(made):
            async for value in made:
                self._publish(value)
                del value
                await wait(self._end)
        self._check_has_yielded()

    def _publish(self, value: Any) -> None:
        if self._value.done():
            raise RuntimeError(f"it yielded twice; {ONCE}")
        self._value.set_result(value)

    async def _publish_awaited(self, made: Awaitable[Any], wait: Any) -> None:
        self._value.set_result(await made)

    def _check_has_yielded(self) -> None:
        if not self._value.done():
            raise RuntimeError(f"it yielded nothing; {ONCE}")

    def _warn(self, words: str) -> None:
        place = place_of_function(self._function) or Place(self._label, 0, "")
        warnings.warn_explicit(words, EnvironmentWarning, place.file, place.line)


async def _until_under_trio(end: Future[None]) -> None:
    over, token = trio.Event(), trio.lowlevel.current_trio_token()
    end.add_done_callback(lambda _: _soon(token, over.set))
    await over.wait()


async def _until_on_asyncio(end: Future[None]) -> None:
    await asyncio.wrap_future(end)


def _soon(token: trio.lowlevel.TrioToken, function: Callable[[], object]) -> None:
    with contextlib.suppress(trio.RunFinishedError):  # no task waits any more
        token.run_sync_soon(function)


# --- the values of the process --------------------------------------------------------------------------------------

_lock = threading.Lock()
_values: list[tuple[Any, Any, SharedValue]] = []  # settings need not have a hash
_blocks = 0


def shared_value(component: Any, settings: Any, make: Callable[[], Any]) -> SharedValue:
    """The process's value for an environment's component and settings. `make` builds an environment object."""
    with _lock:
        for entry in list(_values):
            if entry[2].has_failed:
                _values.remove(entry)  # try again
            elif _is_same(entry[0], component) and _is_same(entry[1], settings):
                return entry[2]
        if not _values:
            atexit.register(_close_all)
        _values.append((component, settings, SharedValue(make)))
        return _values[-1][2]


@contextlib.contextmanager
def shared_values(cleanup_seconds: float = CLEANUP_SECONDS) -> Iterator[None]:
    """A block that uses values. They are cleaned up when the last open block of the process ends, also if it ends with
    an exception or Ctrl-C; without any block, at interpreter exit. Each clean-up has `cleanup_seconds`.
    """
    global _blocks
    with _lock:
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            is_last = _blocks == 0
        if is_last:
            _close_all(cleanup_seconds)


def _close_all(cleanup_seconds: float = CLEANUP_SECONDS) -> None:
    atexit.unregister(_close_all)
    with _lock:
        values = [value for _, _, value in reversed(_values)]
        _values.clear()
    for value in values:
        value.close(cleanup_seconds)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        with authors_code():
            return bool(one == other)
    except Exception:  # settings may be objects of an author, such as arrays
        return False
