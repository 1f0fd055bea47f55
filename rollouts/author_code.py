"""Protection against code of plugin authors: environments, rewards, filters, metrics, losses, hooks.

Such code may raise anything and return anything. Inside `authors_code`, every error becomes an `Exception` with a
readable message. `message_of`, `printable` and `shown` describe errors and objects of such code, and never raise.

A real Ctrl-C passes unchanged. Any other error that is not an `Exception` (a `KeyboardInterrupt` from a `raise`
statement, `SystemExit`, `GeneratorExit`, `asyncio.CancelledError`) becomes a RuntimeError. `rollouts.env.calls` handles
trio's cancellation.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import linecache
import os
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollouts.doors import HOMES

CHARACTERS_MAX = 200  # the longest value in an error message
LINE_CHARACTERS_MAX = 120  # the longest line of an author's file in an error message
RAISE = dis.opmap["RAISE_VARARGS"]
CORE = tuple(f"{home / package}/" for package, home in HOMES.items())
STANDARD_LIBRARY = f"{Path(os.__file__).parent}/"
DECORATOR_LINES_MAX = 20
INSTALLED = ("/site-packages/", "/dist-packages/")
MACHINERY = frozenset(
    {"click", "h11", "httpcore", "httpx", "msgspec", "outcome", "pluggy", "torch", "transformers", "trio"}
)
"""Installed packages that the core calls. Their code is not the code of a plugin author."""


class Place(NamedTuple):
    """A line of an author's file: its path, its number from 1, and its text without indentation."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        shown_path = Path(self.file)
        with contextlib.suppress(OSError, ValueError):  # the current folder was removed, or the file is outside of it
            shown_path = shown_path.relative_to(Path.cwd())
        text = f": {self.text}" if len(self.text) <= LINE_CHARACTERS_MAX else f": {self.text[:LINE_CHARACTERS_MAX]}..."
        return printable(f"{shown_path}, line {self.line}{text if self.text else ''}")


class authors_code:
    """Run an author's code in a `with` block. An exception of the block is replaced by `as_exception(error, passes)`.

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
    closed. Python raises Ctrl-C only in the main thread. An error from the author's own `raise` is not from outside; an
    error from a signal handler of trio or rollouts is.
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
    return module not in ("trio", *HOMES) and trace.tb_frame.f_code.co_code[trace.tb_lasti] == RAISE


def as_exception(error: BaseException, passes: Callable[[BaseException], bool] = is_from_outside) -> BaseException:
    """The error itself if it is an Exception with a readable message, or if `passes(error)`; else an Exception that
    describes it. For an exception group: only the errors in it that pass, if there are any, because they caused the
    others.
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
    """The line of the author's file that raised the error; None if no author's code raised it.

    The line is that of the innermost frame outside the core, the standard library and the installed packages. For an
    installed component, it is that of the innermost frame in the component's package; for a SyntaxError, the line with
    the mistake.
    """
    if isinstance(error, SyntaxError) and error.lineno and is_file(error.filename):
        return _place(error.filename or "", error.lineno)
    foreign = [(file, line) for file, line in _frames(error) if not file.startswith(CORE) and not _is_standard(file)]
    own = [(file, line) for file, line in foreign if not _package(file)]
    if not own:
        installed = [(file, line) for file, line in foreign if _package(file) not in MACHINERY]
        own = [(file, line) for file, line in installed if _package(file) == _package(installed[0][0])]
    return _place(*own[-1]) if own else None


def innermost_place(error: BaseException) -> Place | None:
    """The line that raised the error, in any file. Use it for a bug in the core."""
    frames = _frames(error)
    return _place(*frames[-1]) if frames else None


def _frames(error: BaseException) -> list[tuple[str, int]]:
    """File and line of each frame that has a file, outermost first."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    return [(file, line) for file, line in frames if is_file(file)]


def passed_through(error: BaseException, owner: object) -> bool:
    """Whether a line of the file that defines the class of `owner` took part in the error. False for a class of the
    core.
    """
    file = str(getattr(sys.modules.get(type(owner).__module__), "__file__", "") or CORE[0])
    return not file.startswith(CORE) and any(each == file for each, _ in _frames(error))


def place_of_function(function: Any) -> Place | None:
    """The line of a function's definition, below its decorators; None if it is not written in Python."""
    plain = unwrapped(function)
    while isinstance(plain, staticmethod | classmethod) or hasattr(plain, "__func__"):
        plain = plain.__func__
    code = getattr(plain, "__code__", None) or getattr(vars(type(plain)).get("__call__"), "__code__", None)
    if code is None or not is_file(code.co_filename):
        return None
    first = code.co_firstlineno
    count = 1 if code.co_name == "<lambda>" else DECORATOR_LINES_MAX
    lines = [_place(code.co_filename, first + below) for below in range(count)]
    return next((line for line in lines if line.text.startswith(("def ", "async def "))), lines[0])


def place_of_parameter(component: Any, name: str) -> Place | None:
    """The line that writes a parameter of a function, or of a class's constructor; None if there is no source."""
    inner = unwrapped(component)
    if not inspect.isclass(inner):
        owners: list[Any] = [inner]
    else:
        is_dataclass = hasattr(inner, "__dataclass_fields__")
        owners = list(inner.__mro__[:-1]) if is_dataclass else [inner.__init__]
    for owner in owners:
        try:
            (lines, first), file = inspect.getsourcelines(owner), inspect.getsourcefile(owner)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            written = node.target if isinstance(node, ast.AnnAssign) else node
            known = written.id if isinstance(written, ast.Name) else written.arg if isinstance(written, ast.arg) else ""
            if known == name and isinstance(node, ast.AnnAssign | ast.arg):
                return _place(file or "", first + node.lineno - 1)
    return None


def with_place(error: BaseException, function: Any) -> str:
    """The message of an error with the line of the function that caused it, below it."""
    place = place_of_function(function)
    return f"{message_of(error)}\n  {place}" if place else message_of(error)


def is_file(name: str | None) -> bool:
    """Whether the file name of a code object is a file, not `<string>` or `<frozen ...>`."""
    return bool(name) and not str(name).startswith("<")


def _is_standard(file: str) -> bool:
    return file.startswith(STANDARD_LIBRARY) and not any(part in file for part in INSTALLED)


def _package(file: str) -> str:
    """The installed package that contains a file; empty if no package does."""
    for part in INSTALLED:
        _, found, inside = file.rpartition(part)
        if found:
            return inside.partition("/")[0].removesuffix(".py")
    return ""


def _place(file: str, line: int) -> Place:
    linecache.checkcache(file)
    return Place(file, line, linecache.getline(file, line).strip())


def message_of(error: BaseException) -> str:
    """The message of an error, printable. If `str(error)` raises, a text that says so.

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


def why_no_list(value: Any) -> str:
    """Why a value is not read as a list of values; empty if it is. An iterable is read in its order.

    >>> why_no_list({"a": 1}), why_no_list("ab"), why_no_list(3), why_no_list(iter([3]))
    ('of which only the keys would be read', 'of which the characters would be read', 'which cannot be iterated', '')
    """
    if isinstance(value, str | bytes | bytearray):
        return "of which the characters would be read"
    if isinstance(value, Mapping):
        return "of which only the keys would be read"
    if hasattr(value, "iterrows"):  # a table of pandas
        return "of which only the names of the columns would be read"
    if isinstance(value, set | frozenset):
        return "whose order is not the same in each run"
    return "" if isinstance(value, Iterable) and not inspect.isawaitable(value) else "which cannot be iterated"


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
    """`how(value)`, where `how` is `str` or `repr`; None if `how` raises."""
    try:
        with authors_code():
            return str.__str__(how(value))
    except Exception:  # the `str` or `repr` of any class may raise anything
        return None
