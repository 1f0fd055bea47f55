"""The boundary around code that the core does not own: environments, rewards, filters, metrics, losses, hooks.

An author's code may raise anything and return anything. `authors_code` lets only exceptions through that an ordinary
`except Exception` catches and whose message can be read. `message_of`, `printable` and `shown` put an author's errors
and objects into words and never raise.

What may pass as it is: a real Ctrl-C. Everything else that is no `Exception` (`KeyboardInterrupt` from a `raise`
statement, `SystemExit`, `GeneratorExit`, `asyncio.CancelledError`) becomes a RuntimeError. Left out: trio's own
cancellation, which `rollouts.env.calls` handles.
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
    """Run an author's code inside. What it raises comes out as `as_exception` has it; `passes` as there.

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
    """Whether the author's code is only where this was raised: Ctrl-C, which reaches the main thread alone, and the
    GeneratorExit of a coroutine that is closed. A `raise` statement of the author's is neither.

    A `raise` in a signal handler of trio's or the core's counts as Ctrl-C.
    """
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is not threading.main_thread():
        return False
    return isinstance(error, KeyboardInterrupt | GeneratorExit) and not _is_from_statement(error)


def _is_from_statement(error: BaseException) -> bool:
    """Whether a `raise` statement raised this, in a module that is neither trio's nor the core's."""
    trace = error.__traceback__
    if trace is None:
        return True
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    return module not in ("trio", "rollouts") and trace.tb_frame.f_code.co_code[trace.tb_lasti] == RAISE


def as_exception(error: BaseException, passes: Callable[[BaseException], bool] = is_from_outside) -> BaseException:
    """The error itself where it is an Exception with a readable message, or where it `passes`; else an Exception that
    says what it was. Of a group, what passes wins: the rest was raised because of it.
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
    """The message of an error, printable; where its `str` raises, words that say so.

    >>> class Hostile(Exception):
    ...     def __str__(self): raise ValueError
    >>> message_of(Hostile())
    'a Hostile whose message cannot be read'
    """
    text = _reads(error, str)
    return f"a {type(error).__name__} whose message cannot be read" if text is None else printable(text)


def shown(value: Any, characters_max: int = CHARACTERS_MAX) -> str:
    """The value as `repr` has it, printable and cut; where its `repr` raises, its type.

    >>> shown([1, 2]), shown("x" * 300, 3), shown(10 ** 5000)
    ('[1, 2]', "'xx...", 'a value of type int')
    """
    text = _reads(value, repr)
    if text is None:
        return f"a value of type {type(value).__name__}"
    return printable(text if len(text) <= characters_max else f"{text[:characters_max]}...")


def unwrapped(function: Any) -> Any:
    """The function itself, without what `functools.partial` bound to it.

    >>> import functools
    >>> unwrapped(functools.partial(functools.partial(print, 1), end=""))
    <built-in function print>
    """
    while isinstance(function, functools.partial):
        function = function.func
    return function


def printable(text: str) -> str:
    r"""The text as UTF-8 can hold it: a lone surrogate, half of a character, is written as its escape.

    >>> printable("caf\xe9 \ud800")
    'caf\xe9 \\ud800'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return str.__str__(text)  # a plain one, also of a subclass


def _reads(value: Any, how: Callable[[Any], str]) -> str | None:
    """What `str` or `repr` says of the value; None where that raises."""
    try:
        with authors_code():
            return str.__str__(how(value))
    except Exception:  # any class may say anything of itself, and raise anything
        return None
