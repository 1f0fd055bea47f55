"""Protection against code of plugin authors: environments, rewards, filters, metrics, losses, hooks.

Such code may raise anything and return anything. Inside `authors_code`, every error becomes an `Exception` with a
readable message. `message_of`, `printable` and `shown` describe errors and objects of such code, and never raise.

A real Ctrl-C passes unchanged. Any other error that is not an `Exception` (a `KeyboardInterrupt` from a `raise`
statement, `SystemExit`, `GeneratorExit`, `asyncio.CancelledError`) becomes a RuntimeError. `rollouts.env.calls` handles
trio's cancellation.
"""

from __future__ import annotations

import dis
import functools
import threading
from collections.abc import Callable
from typing import Any, Literal

CHARACTERS_MAX = 200  # of a value in an error message
RAISE = dis.opmap["RAISE_VARARGS"]


class authors_code:
    """Run an author's code in a `with` block. What it raises leaves the block as `as_exception(error, passes)`.

    >>> try:
    ...     with authors_code():
    ...         raise SystemExit(3)
    ... except RuntimeError as error:
    ...     print(error)
    it called sys.exit(3)
    """

    __slots__ = ("_passes",)

    def __init__(self, passes: Callable[[BaseException], bool] | None = None) -> None:
        self._passes = passes or is_from_outside

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> Literal[False]:
        if error is not None:
            safe = as_exception(error, self._passes)
            if safe is not error:
                raise safe from error
        return False


def is_from_outside(error: BaseException) -> bool:
    """Whether the error came from outside the author's code: a Ctrl-C, or the GeneratorExit of a coroutine that is
    closed. Python raises Ctrl-C only in the main thread. An error from the author's own `raise` is not from outside;
    one from a signal handler of trio or rollouts is.
    """
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is not threading.main_thread():
        return False
    return isinstance(error, KeyboardInterrupt | GeneratorExit) and not _is_from_statement(error)


def _is_from_statement(error: BaseException) -> bool:
    """Whether a `raise` statement outside trio and rollouts raised this error."""
    trace = error.__traceback__
    if trace is None:
        return True
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    return module not in ("trio", "rollouts") and trace.tb_frame.f_code.co_code[trace.tb_lasti] == RAISE


def as_exception(error: BaseException, passes: Callable[[BaseException], bool] = is_from_outside) -> BaseException:
    """The error itself if it is an Exception with a readable message, or if `passes(error)`; else an Exception that
    describes it. For a group: the errors in it that pass, if any, because they caused the others.
    """
    if isinstance(error, BaseExceptionGroup) and not isinstance(error, Exception):
        passing, _ = error.split(passes)
        return passing or ExceptionGroup(error.message, [_tame(each) for each in error.exceptions])
    return error if passes(error) else _tame(error)


def _tame(error: BaseException) -> Exception:
    if isinstance(error, BaseExceptionGroup) and not isinstance(error, Exception):
        return ExceptionGroup(error.message, [_tame(each) for each in error.exceptions])
    if isinstance(error, SystemExit):
        return RuntimeError(f"it called sys.exit({shown(error.code)})").with_traceback(error.__traceback__)
    if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
        message = message_of(error)
        words = f"it raised {type(error).__name__}" + (f": {message}" if message else "")
        return RuntimeError(words).with_traceback(error.__traceback__)
    if _reads(error, str) is None:
        return RuntimeError(message_of(error)).with_traceback(error.__traceback__)
    return error


def message_of(error: BaseException) -> str:
    """The message of an error, printable. If its `str` raises, the result says so.

    >>> class Hostile(Exception):
    ...     def __str__(self): raise ValueError
    >>> message_of(Hostile())
    'a Hostile whose message cannot be read'
    """
    text = _reads(error, str)
    return f"a {type(error).__name__} whose message cannot be read" if text is None else printable(text)


def shown(value: Any, characters_max: int = CHARACTERS_MAX) -> str:
    """The `repr` of a value, printable and at most `characters_max` long. If `repr` raises, the value's type.

    >>> shown([1, 2]), shown("x" * 300, 3), shown(10 ** 5000)
    ('[1, 2]', "'xx...", 'a value of type int')
    """
    text = _reads(value, repr)
    if text is None:
        return f"a value of type {type(value).__name__}"
    return printable(text if len(text) <= characters_max else f"{text[:characters_max]}...")


def unwrapped(function: Any) -> Any:
    """The function inside any number of `functools.partial` objects.

    >>> import functools
    >>> unwrapped(functools.partial(functools.partial(print, 1), end=""))
    <built-in function print>
    """
    while isinstance(function, functools.partial):
        function = function.func
    return function


def printable(text: str) -> str:
    r"""The text with every lone surrogate replaced by its escape, since UTF-8 cannot encode one.

    >>> printable("caf\xe9 \ud800")
    'caf\xe9 \\ud800'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return str.__str__(text)  # a plain str, not a subclass


def _reads(value: Any, how: Callable[[Any], str]) -> str | None:
    """`how(value)`, where `how` is `str` or `repr`; None if it raises."""
    try:
        with authors_code():
            return str.__str__(how(value))
    except Exception:  # the `str` or `repr` of any class may raise anything
        return None
