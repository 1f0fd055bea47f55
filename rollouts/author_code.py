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
import linecache
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

CHARACTERS_MAX = 200  # of a value in an error message
LINE_CHARACTERS_MAX = 120  # of a line of an author's file in an error message
RAISE = dis.opmap["RAISE_VARARGS"]
CORE = f"{Path(__file__).parent}/"
STANDARD_LIBRARY = f"{Path(os.__file__).parent}/"
DECORATOR_LINES_MAX = 20
INSTALLED = ("/site-packages/", "/dist-packages/")


class Place(NamedTuple):
    """A line of an author's file: its path, its number from 1, and its text without indentation."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        path = Path(self.file)
        shown_path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        text = f": {self.text}" if len(self.text) <= LINE_CHARACTERS_MAX else f": {self.text[:LINE_CHARACTERS_MAX]}..."
        return printable(f"{shown_path}, line {self.line}{text if self.text else ''}")


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


def place_of(error: BaseException) -> Place | None:
    """The line of the author's file that raised the error; None where no author's code did.

    This is the innermost frame outside of the core, the standard library and the installed packages. Of an installed
    component it is the innermost frame in the component's own package. A SyntaxError names its line itself.
    """
    if isinstance(error, SyntaxError) and error.lineno and is_file(error.filename):
        return _place(error.filename or "", error.lineno)
    foreign = [(file, line) for file, line in _frames(error) if not file.startswith(CORE) and not _is_standard(file)]
    own = [(file, line) for file, line in foreign if not any(part in file for part in INSTALLED)]
    if not own and foreign:
        package = _package(foreign[0][0])
        own = [(file, line) for file, line in foreign if _package(file) == package]
    return _place(*own[-1]) if own else None


def innermost_place(error: BaseException) -> Place | None:
    """The line that raised the error, in whatever file: for a mistake of the core's own."""
    frames = _frames(error)
    return _place(*frames[-1]) if frames else None


def _frames(error: BaseException) -> list[tuple[str, int]]:
    """File and line of each frame that has a file, outermost first."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    return [(file, line) for file, line in frames if is_file(file)]


def place_of_function(function: Any) -> Place | None:
    """The line on which a function is defined, below its decorators; None where it is not written in Python."""
    plain = unwrapped(function)
    while isinstance(plain, staticmethod | classmethod) or hasattr(plain, "__func__"):
        plain = plain.__func__
    code = getattr(plain, "__code__", None) or getattr(vars(type(plain)).get("__call__"), "__code__", None)
    if code is None or not is_file(code.co_filename):
        return None
    first = code.co_firstlineno
    lines = [_place(code.co_filename, first + below) for below in range(DECORATOR_LINES_MAX)]
    return next((line for line in lines if line.text.startswith(("def ", "async def "))), lines[0])


def is_file(name: str | None) -> bool:
    """Whether the file name of a code object is that of a file, not `<string>` or `<frozen ...>`."""
    return bool(name) and not str(name).startswith("<")


def _is_standard(file: str) -> bool:
    return file.startswith(STANDARD_LIBRARY) and not any(part in file for part in INSTALLED)


def _package(file: str) -> str:
    """The installed package that a file is in."""
    for part in INSTALLED:
        before, found, inside = file.rpartition(part)
        if found:
            return f"{before}{part}{inside.partition('/')[0]}"
    return file


def _place(file: str, line: int) -> Place:
    linecache.checkcache(file)
    return Place(file, line, linecache.getline(file, line).strip())


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
